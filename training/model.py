"""DeepSeek-V4 written for training: whole sequences in parallel, gradients everywhere, parameters under native names.

The forward pass is that of the released architecture (hyper-connections, sliding-window, compressed-sparse and heavily
compressed attention, hash and score routed experts). `Model.forward` reads whole sequences; `keep` returns what a later
call needs to continue one document with many questions at once (`prefix`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from attention import Attention
from experts import FeedForward
from hyper_connections import gather_streams, hyper_weights, scatter_streams, stream_mixes
from parts import Linear, Norm, Pass, rms_norm, rope_frequencies
from shape import Shape
from torch import nn

__all__ = ["Model", "Pass", "Shape"]


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape, self.number = shape, layer
        self.attn_norm, self.ffn_norm = Norm(shape.hidden_size), Norm(shape.hidden_size)
        self.attn = Attention(shape, shape.compress_ratios[layer])
        self.ffn = FeedForward(shape, layer)
        streams = shape.hc_mult
        for part in ("attn", "ffn"):
            fn = torch.randn((2 + streams) * streams, streams * shape.hidden_size) * 0.02
            base = torch.cat([torch.zeros(2 * streams), (4.0 * torch.eye(streams)).flatten()])
            base[:streams] = math.log(1 / (streams - 1))
            self.register_parameter(f"hc_{part}_fn", nn.Parameter(fn))
            self.register_parameter(f"hc_{part}_base", nn.Parameter(base))
            self.register_parameter(f"hc_{part}_scale", nn.Parameter(torch.full((3,), 0.5)))

    def forward(self, streams: torch.Tensor, tokens: torch.Tensor, run: Pass) -> torch.Tensor:
        for part, norm in (("attn", self.attn_norm), ("ffn", self.ffn_norm)):
            fn, base, scale = (getattr(self, f"hc_{part}_{name}") for name in ("fn", "base", "scale"))
            pre, post, mix = hyper_weights(streams, fn, base, scale, self.shape)
            x = rms_norm(gather_streams(streams, pre), norm.weight, self.shape.rms_norm_eps).view(*tokens.shape, -1)
            update = self.attn(x, run, self.number) if part == "attn" else self.ffn(x, tokens, run, self.number)
            streams = scatter_streams(streams, update.flatten(0, 1), post, mix)
        return streams


class Model(nn.Module):
    """The whole network; `dtype` is the compute dtype of activations (parameters stay fp32)."""

    def __init__(self, shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape, self.dtype = shape, dtype
        self.embed = Linear(shape.vocab_size, shape.hidden_size, stored="bf16")
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in range(len(shape.compress_ratios)))
        self.norm = Norm(shape.hidden_size)
        self.head = Linear(shape.vocab_size, shape.hidden_size, stored="bf16")
        self.hc_head_fn = nn.Parameter(torch.randn(shape.hc_mult, shape.hc_mult * shape.hidden_size) * 0.02)
        self.hc_head_base = nn.Parameter(torch.zeros(shape.hc_mult))
        self.hc_head_scale = nn.Parameter(torch.full((1,), 0.5))
        with torch.no_grad():
            self.embed.weight.mul_(shape.hidden_size**0.5)
            for layer in self.each_layer():
                # Sub-blocks start small, so that depth does not drown the embedding.
                for part in (layer.attn.wo_b, layer.ffn.experts.w2, layer.ffn.shared_experts.w2):
                    part.weight.mul_(0.5)
        for compressed in (False, True):
            self.register_buffer(
                f"frequencies_{int(compressed)}", rope_frequencies(shape, compressed), persistent=False
            )

    def forward(self, tokens: torch.Tensor, run: Pass, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits fp32 [B, S, vocab] of tokens int64 [B, S]; S is a multiple of the window unless a prefix is given.

        `positions` int64 [B, S] may jump by multiples of the largest compress ratio; 0, 1, 2, ... unless given.
        """
        if positions is None:
            positions = (run.prefix_length + torch.arange(tokens.shape[1], device=tokens.device)).expand_as(tokens)
        run = replace(run, tables={})
        for compressed in (False, True):
            angles = positions.float()[..., None] * getattr(self, f"frequencies_{int(compressed)}")
            run.tables[compressed] = (angles.cos(), angles.sin())
        streams = F.embedding(tokens, self.embed.weight).to(self.dtype).flatten(0, 1)
        streams = streams.unsqueeze(1).expand(-1, self.shape.hc_mult, -1).contiguous()
        for layer in self.each_layer():
            streams = layer(streams, tokens, run)
        mixes = stream_mixes(streams, self.hc_head_fn, self.shape.rms_norm_eps)
        pre = torch.sigmoid(mixes * self.hc_head_scale + self.hc_head_base) + self.shape.hc_eps
        y = rms_norm(gather_streams(streams, pre), self.norm.weight, self.shape.rms_norm_eps)
        return F.linear(y.float(), self.head.weight).view(*tokens.shape, -1)

    def each_layer(self) -> list[Layer]:
        """The layers in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def native_state(self) -> dict[str, torch.Tensor]:
        """Every tensor in fp32 (tid2eid int64) under its checkpoint name, experts one by one."""
        state: dict[str, torch.Tensor] = {}
        for name, value in self.state_dict().items():
            value = value.detach().cpu()
            if ".experts." in name:
                for expert, part in enumerate(value):
                    state[name.replace(".experts.", f".experts.{expert}.")] = part.contiguous()
            else:
                state[name] = value.contiguous()
        return state

    @torch.no_grad()
    def load_native(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `native_state`; raises KeyError for a missing tensor."""
        for name, value in self.state_dict(keep_vars=True).items():
            if ".experts." in name:
                count = self.shape.n_routed_experts
                source = torch.stack([state[name.replace(".experts.", f".experts.{e}.")] for e in range(count)])
            else:
                source = state[name]
            value.copy_(source)

"""A model with paged caches, driven by hand: any tokens of any sequences in any step, all logits given back."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tetrad.cache.groups import CacheSizes
from tetrad.cache.pools import CachePools
from tetrad.core.messages import Sampling
from tetrad.core.plan import NEXT, Admission, BlockDelta, Segment, StepPlan
from tetrad.geometry import DRAFT_ROWS, IndexDtype, KVDtype, blocks_for, width_blocks
from tetrad.models.caches import cache_groups, layer_caches
from tetrad.models.checkpoint.dummy import fill_dummy
from tetrad.models.config import ModelConfig
from tetrad.models.deepseek_v4 import DeepseekV4
from tetrad.models.indexer import IndexerOptions
from tetrad.models.linear import ActivationQuant
from tetrad.models.step import StepShape
from tetrad.runner.request_table import RequestTable


def dummy_model(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    quant: ActivationQuant = ActivationQuant.NONE,
    logits_budget_bytes: int = 2048 << 20,
) -> DeepseekV4:
    """A model with seeded random weights."""
    model = DeepseekV4(config, dtype, quant=quant, indexer_options=IndexerOptions(logits_budget_bytes))
    fill_dummy(model, config, seed)
    return model


@dataclass
class Held:
    """A sequence: its tokens, its row in the request table, and its blocks."""

    request: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class Session:
    """Sequences over one model. Caches are poisoned with NaN, and blocks are handed out in a scattered order."""

    def __init__(
        self,
        model: DeepseekV4,
        *,
        kv_dtype: str = "fp32",
        index_dtype: str = "fp32",
        dtype: torch.dtype = torch.float32,
        max_len: int = 1024,
        max_seqs: int = 4,
        scatter: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model = model
        groups = cache_groups(
            model.config, kv_dtype=KVDtype(kv_dtype), index_dtype=IndexDtype(index_dtype), compute_dtype=dtype
        )
        blocks = blocks_for(max_len) * max_seqs
        self.pools = CachePools(groups, CacheSizes(blocks, max_seqs, max_len * max_seqs), device)
        self.pools.poison()
        self.caches = layer_caches(model.config, self.pools)
        generator = torch.Generator().manual_seed(scatter)
        self.free_blocks = torch.randperm(blocks, generator=generator).tolist()
        self.free_requests = torch.randperm(max_seqs, generator=generator).tolist()
        self.table = RequestTable(
            requests=max_seqs,
            max_model_len_blocks=blocks_for(max_len),
            step_rows=max_len * max_seqs,
            device=torch.device(device),
        )
        self.sequences: dict[str, Held] = {}
        self.shapes: list[StepShape] = []

    def feed(
        self, tokens: dict[str, list[int]], accept: dict[str, int] | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """One step: append these tokens to these sequences. Per sequence (logits [n, V], streams [n, N, D]).

        ``accept``: of a sequence's tokens only so many count, and the next step goes on behind them.
        """
        segments, admissions, deltas = [], [], []
        for name, new in tokens.items():
            if name not in self.sequences:
                self.sequences[name] = Held(self.free_requests.pop())
                admissions.append(Admission(self.sequences[name].request, 0, (), (), Sampling(), 0))
            held = self.sequences[name]
            start = len(held.tokens)
            for index in range(len(held.blocks), blocks_for(start + len(new))):
                held.blocks.append(self.free_blocks.pop())
                deltas.append(BlockDelta(held.request, index, held.blocks[index]))
            decodes = start > 0 and len(new) <= 1 + DRAFT_ROWS
            if decodes:
                self.table.draw([(held.request, new[0])])
            segments.append(
                Segment(
                    held.request,
                    len(new),
                    NEXT if decodes else start,
                    tuple(new[1:] if decodes else new),
                    len(new),
                )
            )
            held.tokens += new
        longest = max(len(held.tokens) for held in self.sequences.values())
        plan = StepPlan(tuple(segments), width_blocks(longest), tuple(admissions), tuple(deltas))
        return self._run(plan, tokens, accept or {})

    @torch.no_grad()
    def _run(
        self, plan: StepPlan, tokens: dict[str, list[int]], accept: dict[str, int]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        rows = self.table.apply(pickle.loads(pickle.dumps(plan)))
        self.shapes.append(rows.shape)
        streams = self.model.streams(self.model.metadata(rows), self.caches)
        logits = self.model.logits(streams[rows.wanted.clamp_min(0)])
        accepted = [accept.get(name, len(new)) for name, new in tokens.items() for _ in new]
        padded = torch.tensor(accepted + [0] * (rows.shape.rows - len(accepted)), device=self.table.device)
        self.table.advance(rows, padded)
        result, row = {}, 0
        for name, new in tokens.items():
            held, end = self.sequences[name], row + len(new)
            result[name] = (logits[row:end].clone(), streams[row:end].clone())
            row = end
            if name in accept:
                del held.tokens[len(held.tokens) - len(new) + accept[name] :]
        return result

    def run(self, name: str, tokens: list[int], chunks: list[int]) -> tuple[Tensor, Tensor]:
        """Feed one sequence in chunks (the last one repeats); logits and streams of all its tokens."""
        chunks = copy.copy(chunks)
        parts, place = [], 0
        while place < len(tokens):
            size = chunks.pop(0) if len(chunks) > 1 else chunks[0]
            parts.append(self.feed({name: tokens[place : place + size]})[name])
            place += size
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def release(self, name: str) -> None:
        """Give back what a sequence holds; its blocks and rings keep stale contents, as they would in an engine."""
        held = self.sequences.pop(name)
        self.free_blocks += held.blocks
        self.free_requests.append(held.request)

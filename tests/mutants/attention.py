"""Queries, keys, window, sinks, output projection and rotation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.mutants.mutant import Patch, everywhere, holding, mutant
from tetrad.geometry import PagedKV, entry_slots
from tetrad.models import step
from tetrad.models.config import ModelConfig
from tetrad.models.step import Rows, WindowMetadata
from tetrad.ops.kv_entries import read_kv_entries
from tetrad.ops.sparse_attention import History

ATTENTION = "tetrad.models.attention:"
FREQUENCIES = "tetrad.models.rotary:inverse_frequencies"
ANGLES = "tetrad.models.rotary:angles"
WINDOW = "tetrad.models.step:WindowMetadata.build"
ROTATE = "tetrad.ops.rotary:apply_rotary"


# ---- rotation ----


def without_rope(write_pooled: Any) -> Any:
    def wrong(pooled, norm_weight, eps, cos, sin, *rest, **options):
        return write_pooled(pooled, norm_weight, eps, torch.ones_like(cos), torch.zeros_like(sin), *rest, **options)

    return wrong


def on_rotated_channels(change: Callable[[Tensor, int], Tensor], undo: Callable[[Tensor, int], Tensor]) -> Any:
    """Rotation of ``change(x, rotated channels)``, which is undone behind it."""

    def make(rotary: Any) -> Any:
        def wrong(x, cos, sin, *, inverse=False):
            rope = 2 * cos.shape[-1]
            return undo(rotary(change(x, rope), cos, sin, inverse=inverse), rope)

        return wrong

    return make


def pairs_of_halves(x: Tensor, rope: int) -> Tensor:
    return torch.cat((x[..., :-rope], x[..., -rope:].unflatten(-1, (2, -1)).mT.flatten(-2)), -1)


def halves_of_pairs(x: Tensor, rope: int) -> Tensor:
    return torch.cat((x[..., :-rope], x[..., -rope:].unflatten(-1, (-1, 2)).mT.flatten(-2)), -1)


def plain_frequencies(config: ModelConfig, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, config.qk_rope_head_dim, 2).float() / config.qk_rope_head_dim)


def without_yarn(frequencies: Any) -> Any:
    def wrong(config: ModelConfig, *, compressed: bool) -> Tensor:
        return (
            plain_frequencies(config, config.compress_rope_theta)
            if compressed
            else frequencies(config, compressed=False)
        )

    return wrong


def yarn_in_the_window(frequencies: Any) -> Any:
    def wrong(config: ModelConfig, *, compressed: bool) -> Tensor:
        if not compressed:
            config = dataclasses.replace(config, compress_rope_theta=config.rope_theta)
        return frequencies(config, compressed=True)

    return wrong


def ramp_the_other_way(frequencies: Any) -> Any:
    def wrong(config: ModelConfig, *, compressed: bool) -> Tensor:
        right = frequencies(config, compressed=compressed)
        plain = plain_frequencies(config, config.compress_rope_theta)
        return plain + plain / config.rope_factor - right if compressed else right

    return wrong


def ramp_ends(rounded: Callable[[float], int]) -> Any:
    """YaRN's ramp ends at the channel of ``beta_slow``, which is ``rounded``: up, as it should be."""

    def make(frequencies: Any) -> Any:
        def wrong(config: ModelConfig, *, compressed: bool) -> Tensor:
            if not compressed:
                return frequencies(config, compressed=False)
            rope, base = config.qk_rope_head_dim, config.compress_rope_theta

            def channel(turns: float) -> float:
                context = config.rope_original_max_position_embeddings
                return rope * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

            low = max(math.floor(channel(config.rope_beta_fast)), 0)
            high = min(rounded(channel(config.rope_beta_slow)), rope - 1)
            ramp = ((torch.arange(rope // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
            plain = plain_frequencies(config, base)
            return plain * (1 - ramp) + plain / config.rope_factor * ramp

        return wrong

    return make


def angles_in_fp64(_: Any) -> Any:
    def wrong(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.double().unsqueeze(1) * frequencies
        return torch.cos(angle).float(), torch.sin(angle).float()

    return wrong


# ---- keys and queries ----


def without_key_norm(forward: Any) -> Any:
    def wrong(self, x, metadata, cache):
        with holding(self.kv_norm.weight, torch.ones_like(self.kv_norm.weight)):
            return forward(self, x, metadata, cache)

    return wrong


def heads_interleaved(project: Any) -> Any:
    def wrong(self, output: Tensor) -> Tensor:
        return project(self, output.unflatten(1, (-1, self.config.o_groups)).transpose(1, 2).flatten(1, 2))

    return wrong


# ---- window ----


def wider_window(keys: int) -> Any:
    """A window of so many keys more, in rings of the right size."""

    def make(build: Any) -> Any:
        def wrong(rows: Rows, window: int, frequencies: Tensor) -> WindowMetadata:
            ring = step.window_ring(window)
            with mock.patch.object(step, "window_ring", return_value=ring):
                return build(rows, window + keys, frequencies)

        return wrong

    return make


def own_key_not_seen(build: Any) -> Any:
    def wrong(rows: Rows, window: int, frequencies: Tensor) -> WindowMetadata:
        right = build(rows, window, frequencies)
        last = (right.visible >= 0).sum(1, keepdim=True) - 1
        return dataclasses.replace(right, visible=right.visible.scatter(1, last.clamp_min(0), -1))

    return wrong


def chunks_in_the_ring(build: Any) -> Any:
    def wrong(rows: Rows, window: int, frequencies: Tensor) -> WindowMetadata:
        return build(dataclasses.replace(rows, shape=rows.shape._replace(chunks=False)), window, frequencies)

    return wrong


# ---- the op ----


def with_sinks(change: Callable[[Tensor], Tensor]) -> Any:
    return lambda attend: lambda q, sinks, *keys, scale: attend(q, change(sinks), *keys, scale=scale)


def without_sinks(attend: Any) -> Any:
    return with_sinks(lambda sinks: torch.full_like(sinks, -1e30))(attend)


def sink_with_a_value(attend: Any) -> Any:
    def wrong(q, sinks, *keys, scale):
        right, plain = attend(q, sinks, *keys, scale=scale), without_sinks(attend)(q, sinks, *keys, scale=scale)
        share = 1 - (right * plain).sum(-1, keepdim=True) / plain.square().sum(-1, keepdim=True)
        return right + share.nan_to_num()

    return wrong


def attention_by_hand(*, rescaled: bool) -> Any:
    """Without ``rescaled`` the values of window keys keep their own maximum when compressed keys raise it."""

    def scores(q: Tensor, cache: PagedKV, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        keys = read_kv_entries(cache, slots, q.dtype).float()
        score = torch.einsum("rhd,rkd->rhk", q.float(), keys) * scale
        return keys, score.masked_fill((slots < 0).unsqueeze(1), float("-inf"))

    def wrong(q, sinks, window, window_slots, compressed=None, compressed_slots=None, *, scale):
        keys, score = scores(q, window, window_slots, scale)
        own = largest = score.amax(-1, keepdim=True).clamp_min(-1e30)
        total = value = torch.zeros(())
        if compressed is not None:
            if isinstance(compressed_slots, History):
                compressed_slots = slots_of(compressed_slots, compressed.layout.entries)
            more, more_score = scores(q, compressed, compressed_slots, scale)
            largest = torch.maximum(largest, more_score.amax(-1, keepdim=True))
            weight = torch.exp(more_score - largest)
            total, value = weight.sum(-1, keepdim=True), weight @ more
        total = total + torch.exp(score - largest).sum(-1, keepdim=True)
        value = value + torch.exp(score - (largest if rescaled else own)) @ keys
        return (value / (total + torch.exp(sinks.view(1, -1, 1) - largest))).to(q.dtype)

    return lambda _: wrong


def slots_of(history: History, entries: int) -> Tensor:
    entry = torch.arange(history.width)
    seen = entry < history.end.unsqueeze(1)
    request = history.row_request.clamp_min(0).unsqueeze(1)
    return entry_slots(history.block_tables, request, entry.where(seen, 0), entries).where(seen, -1)


def without_drafts(ring: Any) -> Any:
    return lambda window: -(-window // 8) * 8


MUTANTS = (
    mutant("no RoPE on compressed keys", Patch(ATTENTION + "write_pooled_kv_entries", without_rope)),
    mutant(
        "theta of window and compressed layers swapped",
        Patch(ATTENTION + "WindowAttention.rotation", lambda _: lambda self, metadata: metadata.rotation),
        Patch(ATTENTION + "Attention.rotation", lambda _: lambda self, metadata: metadata.window.rotation),
    ),
    mutant(
        "queries and window keys of compressed layers with the window's theta",
        Patch(ATTENTION + "Attention.rotation", lambda _: lambda self, metadata: metadata.window.rotation),
    ),
    mutant(
        "no inverse RoPE on the output",
        Patch(ATTENTION + "apply_rotary", lambda rotary: lambda x, cos, sin, *, inverse=False: rotary(x, cos, sin)),
    ),
    mutant(
        "rotary pairs of halves, not of neighbours",
        everywhere(ROTATE, on_rotated_channels(pairs_of_halves, halves_of_pairs)),
    ),
    mutant(
        "RoPE turns the other way",
        everywhere(ROTATE, lambda rotary: lambda x, cos, sin, *, inverse=False: rotary(x, cos, -sin, inverse=inverse)),
    ),
    mutant(
        "RoPE on the first channels",
        everywhere(
            ROTATE,
            on_rotated_channels(lambda x, rope: x.roll(-rope, -1), lambda x, rope: x.roll(rope, -1)),
        ),
    ),
    mutant("no YaRN", everywhere(FREQUENCIES, without_yarn)),
    mutant("YaRN in the window layers", everywhere(FREQUENCIES, yarn_in_the_window)),
    mutant("YaRN's ramp the other way", everywhere(FREQUENCIES, ramp_the_other_way)),
    mutant("YaRN's ramp ends a channel early", everywhere(FREQUENCIES, ramp_ends(math.floor))),
    mutant(
        "angles in fp64",
        everywhere(ANGLES, angles_in_fp64),
        test="tests/models/test_rotary.py::test_angle_is_an_fp32_product",
    ),
    mutant(
        "no norm of the query heads",
        Patch(
            ATTENTION + "rms_norm", lambda norm: lambda x, weight, eps: x if weight is None else norm(x, weight, eps)
        ),
    ),
    mutant("no weight in the key's norm", Patch(ATTENTION + "Attention.forward", without_key_norm)),
    mutant(
        "softmax scaled by YaRN",
        Patch(
            ATTENTION + "sparse_attention",
            lambda attend: lambda *arguments, scale: attend(*arguments, scale=1.277 * scale),
        ),
    ),
    mutant("heads interleaved over the output groups", Patch(ATTENTION + "Attention._project", heads_interleaved)),
    mutant("window one too short", Patch(WINDOW, wider_window(-1))),
    mutant("window one too long", Patch(WINDOW, wider_window(1))),
    mutant("own key not seen", Patch(WINDOW, own_key_not_seen)),
    mutant("keys of a chunk in the ring before they are read", Patch(WINDOW, chunks_in_the_ring)),
    mutant(
        "keys of a chunk not kept in the ring",
        Patch(ATTENTION + "copy_kv_entries", lambda _: lambda cache, sources, targets: None),
    ),
    mutant(
        "no room for drafts in the window's ring",
        everywhere("tetrad.geometry.sizes:window_ring", without_drafts),
        test="tests/models/test_attention.py::test_requests_of_a_step",
    ),
    mutant("no sink", Patch(ATTENTION + "sparse_attention", without_sinks)),
    mutant("sink with a value", Patch(ATTENTION + "sparse_attention", sink_with_a_value)),
    mutant(
        "sums of earlier blocks not rescaled", Patch(ATTENTION + "sparse_attention", attention_by_hand(rescaled=False))
    ),
)

CONTROLS = (
    mutant("YaRN's ramp by hand", everywhere(FREQUENCIES, ramp_ends(math.ceil))),
    mutant("a window of the right size", Patch(WINDOW, wider_window(0))),
    mutant("attention by hand", Patch(ATTENTION + "sparse_attention", attention_by_hand(rescaled=True))),
)

"""One attention layer against its formulas over the whole sequence: fp64, without steps, caches or blocks.

Caches and states begin as NaN, and padding rows are NaN: neither may reach a result.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.models import formulas
from tests.models.steps import Segment, block_tables, lengths, padded, step_rows
from tests.tiny import tiny_config
from torch import Tensor

from tetrad.cache.groups import CacheSizes
from tetrad.cache.pools import CachePools
from tetrad.geometry import DRAFT_ROWS, IndexDtype, KVDtype, window_ring
from tetrad.models.attention import Attention, WindowAttention, attention_layer
from tetrad.models.caches import LayerCache, cache_groups, layer_caches
from tetrad.models.config import LayerKind, ModelConfig
from tetrad.models.indexer import DEFAULT_OPTIONS
from tetrad.models.linear import ActivationQuant
from tetrad.models.rotary import inverse_frequencies
from tetrad.models.step import Metadata

# head sizes and groups that nothing else is equal to
ODD = {
    "num_attention_heads": 6,
    "o_groups": 3,
    "o_lora_rank": 44,
    "head_dim": 112,
    "qk_rope_head_dim": 12,
    "q_lora_rank": 68,
    "hidden_size": 136,
    "sliding_window": 11,
    "index_topk": 5,
    "rms_norm_eps": 0.01,
}
LAYERS = {LayerKind.SWA: "swa", LayerKind.CSA: "csa", LayerKind.HCA: "hca"}


def make_layer(
    kind: LayerKind, quant: ActivationQuant = ActivationQuant.NONE, **overrides
) -> tuple[ModelConfig, Attention]:
    config = tiny_config(LAYERS[kind], **(ODD | overrides))
    layer = attention_layer(config, kind, torch.float32, quant, DEFAULT_OPTIONS)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in layer.named_parameters():
        size = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 and not name.endswith("ape") else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return config, layer


def sequence(config: ModelConfig, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def make_cache(config: ModelConfig, blocks: int, step_rows: int, kv_dtype: str = "fp32") -> LayerCache:
    """The first layer's cache for two requests, full of NaN."""
    groups = cache_groups(config, kv_dtype=KVDtype(kv_dtype), index_dtype=IndexDtype.FP32, compute_dtype=torch.float32)
    pools = CachePools(groups, CacheSizes(blocks, 2, step_rows), "cpu")
    pools.poison()
    return layer_caches(config, pools)[0]


class Steps:
    """A layer, its cache, and steps of up to two requests."""

    def __init__(self, config: ModelConfig, layer: Attention, tokens: int, kv_dtype: str = "fp32") -> None:
        self.config, self.layer = config, layer
        self.tables = block_tables(2, tokens)
        self.cache = make_cache(config, self.tables.numel(), 2 * tokens + 16, kv_dtype)
        self.frequencies = [inverse_frequencies(config, compressed=compressed) for compressed in (False, True)]

    def step(self, segments: list[Segment], x: Tensor, more: int = 0) -> Tensor:
        """x: the rows' inputs [real rows, D]; their outputs. Padding rows are NaN before and zero behind."""
        rows = step_rows(segments, self.tables, more)
        metadata = Metadata.build(rows, self.config, *self.frequencies)
        output = self.layer(padded(x, rows), metadata, self.cache)
        assert output.shape == (rows.shape.rows, self.config.hidden_size)
        assert not output[len(x) :].any()
        return output[: len(x)]


def run(config: ModelConfig, layer: Attention, x: Tensor, chunks: list[int], kv_dtype: str = "fp32") -> Tensor:
    """The layer over the steps of one sequence."""
    steps = Steps(config, layer, len(x), kv_dtype)
    parts = lengths(len(x), chunks)
    return torch.cat([steps.step([part], x[part.start : part.context]) for part in parts])


def formula(config: ModelConfig, layer: Attention, x: Tensor, **options) -> Tensor:
    frequencies = inverse_frequencies(config, compressed=not isinstance(layer, WindowAttention))
    return formulas.attention(config, layer, x.double(), frequencies, **options)


def relative(got: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference, relative to what is expected."""
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("chunks", [[61], [1], [23, 5], [9, 1], [9], [10], [10, 9], [2, 10, 1]], ids=str)
@pytest.mark.parametrize("kind", LayerKind)
def test_layer(kind, chunks):
    """Queries, window, compressed keys, the indexer's choice, sinks, inverse RoPE and the grouped output projection.

    Up to 9 rows of a request go into its ring; 10 are a chunk, whose keys lie beside the rings first.
    """
    config, layer = make_layer(kind)
    x = sequence(config, 61)
    torch.testing.assert_close(run(config, layer, x, chunks).double(), formula(config, layer, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [LayerKind.CSA, LayerKind.HCA], ids=str)
def test_over_several_blocks(kind):
    """Sequences of more than 256 tokens lie in several blocks, and a window reaches from one into the next."""
    config, layer = make_layer(kind, hca_ratio=128, index_topk=16, sliding_window=128)
    x = sequence(config, 535)
    got = run(config, layer, x, [250, 20, 1, 1, 60, 203])
    torch.testing.assert_close(got.double(), formula(config, layer, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [8, 16, 128])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_chunks_around_the_ring(window, more):
    """Rows as many as a ring or a window has keys, or one more or fewer; then what may still be in the ring's way."""
    config, layer = make_layer(LayerKind.SWA, sliding_window=window)
    x = sequence(config, 2 * window_ring(window) + 53)
    expected = formula(config, layer, x)
    for size in (window_ring(window), window):
        got = run(config, layer, x, [size + more, 9, 10, 1, 9, 10, window + more, 1])
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LayerKind)
def test_requests_of_a_step(kind):
    """A chunk and drafts in one step: the chunk's keys are written beside the rings, the drafts' into a ring.

    Both see what they see alone. Of the drafts some are rejected every time, and the next step writes over them.
    """
    config, layer = make_layer(kind)
    chunk, other, wrong = sequence(config, 73), sequence(config, 50, seed=1), sequence(config, 99, seed=2)
    expected = [formula(config, layer, x) for x in (chunk, other)]
    steps = Steps(config, layer, 99)
    found: list[Tensor] = [steps.step([Segment(1, 0, 13)], other[:13])]
    start = [0, 13]
    while start[1] < 40:
        right = (start[0] // 10 + 3) % DRAFT_ROWS
        end = start[1] + 1 + right
        drafts = torch.cat((other[start[1] : end], wrong[: DRAFT_ROWS - right]))
        segments = [Segment(1, start[1], 1 + DRAFT_ROWS)]
        values = drafts
        if start[0] < 70:
            segments.insert(start[0] % 2, Segment(0, start[0], 10 + start[0] % 2))
            more = chunk[start[0] : segments[start[0] % 2].context]
            values = torch.cat((drafts, more) if start[0] % 2 else (more, drafts))
        output = steps.step(segments, values, more=8)
        row = 0
        for segment in segments:
            mine, row = output[row : row + segment.count], row + segment.count
            if segment.request == 0:
                torch.testing.assert_close(
                    mine.double(), expected[0][segment.start : segment.context], rtol=1e-4, atol=1e-4
                )
                start[0] = segment.context
            else:
                found.append(mine[: 1 + right])
        start[1] = end
    got = torch.cat(found).double()
    torch.testing.assert_close(got, expected[1][: len(got)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LayerKind)
def test_padding_writes_nothing(kind):
    """Rows of request -1 with NaN for inputs, among a step or alone in one: no byte of a cache changes."""
    config, layer = make_layer(kind)
    x = sequence(config, 21)
    plain, wide = Steps(config, layer, 61), Steps(config, layer, 61)
    plain.step([Segment(0, 0, 21)], x)
    wide.step([Segment(0, 0, 21)], x, more=16)
    written = bytes_of(plain.cache)
    assert bytes_of(wide.cache) == written
    plain.step([Segment(0, 0, 0)], x[:0], more=8)
    assert bytes_of(plain.cache) == written


def bytes_of(cache: LayerCache) -> list[bytes]:
    """Every byte of a layer's cache, but for the slots of a step, which hold nothing between steps."""
    result = []
    for field in dataclasses.fields(cache):
        value = getattr(cache, field.name)
        pages = value if isinstance(value, Tensor) else value.pages
        pages = pages[:2] if field.name == "window" else pages
        result.append(pages.contiguous().view(torch.uint8).numpy().tobytes())
    return result


@pytest.mark.parametrize("kind", LayerKind)
def test_attention_sees_keys_as_stored(kind):
    """With an FP8 cache the token that a step computes is read back like all others, so chunking changes nothing."""
    config, layer = make_layer(kind)
    x = sequence(config, 61)
    for chunks in ([61], [7, 1]):
        got = run(config, layer, x, chunks, kv_dtype="fp8")
        assert relative(got, formula(config, layer, x, fp8_keys=True)) < 1e-3
        assert relative(got, formula(config, layer, x)) > 5e-3


@pytest.mark.parametrize("kind", LayerKind)
def test_linear_activation_quant(kind):
    """wq_a, wq_b, wkv, wo_b and the indexer's wq_b round their inputs to FP8; wo_a does not."""
    wide = {"hidden_size": 200, "q_lora_rank": 136, "o_lora_rank": 52}  # more than one group of 128
    config, layer = make_layer(kind, ActivationQuant.FP8, **wide)
    x = sequence(config, 61)
    got = run(config, layer, x, [61])
    right = ["wq_a", "wq_b", "wkv", "wo_b", "indexer.wq_b"]
    assert relative(got, formula(config, layer, x, quant=" ".join(right))) < 1e-3
    others = [" ".join(name for name in right if name != left_out) for left_out in right[:4]]
    for other in (*others, " ".join([*right, "wo_a"])):
        assert relative(got, formula(config, layer, x, quant=other)) > 5e-3, other


def test_choice_is_a_choice():
    """The comparison above means something only if the indexer leaves entries out, and which ones matters."""
    config, layer = make_layer(LayerKind.CSA)
    x = sequence(config, 61)
    all_of_them, _ = make_layer(LayerKind.CSA, index_topk=64)
    assert relative(formula(config, layer, x), formula(all_of_them, layer, x)) > 0.01

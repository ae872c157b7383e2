"""One attention layer against its formulas over the whole sequence: fp64, without steps, caches or blocks.

Caches and states begin as NaN, and padding rows are NaN: neither may reach a result.
"""

from __future__ import annotations

import pytest
import torch
from tests.models import formulas
from tests.models.steps import block_tables, lengths, padded, step_inputs
from tests.tiny import tiny_config
from tetrad.cache.kv_cache import KVCaches
from tetrad.cache.spec import CacheSizes, CacheSpec
from torch import Tensor

from tetrad.geometry import IndexDtype, KVDtype
from tetrad.models.attention import Attention
from tetrad.models.config import LayerKind, ModelConfig
from tetrad.models.indexer import DEFAULT_OPTIONS
from tetrad.models.linear import ActivationQuant
from tetrad.models.rotary import inverse_frequencies
from tetrad.models.step import AttentionMetadata

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
    layer = Attention(config, kind, torch.float32, quant, DEFAULT_OPTIONS)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in layer.named_parameters():
        size = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 and not name.endswith("ape") else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return config, layer


def sequence(config: ModelConfig, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def run(config: ModelConfig, layer: Attention, x: Tensor, chunks: list[int], kv_dtype: str = "fp32") -> Tensor:
    """The layer over the steps of one sequence."""
    dims = (config.head_dim, config.qk_rope_head_dim, config.index_head_dim, config.sliding_window)
    ratios = config.compress_ratios[:1]
    spec = CacheSpec(ratios, *dims, KVDtype(kv_dtype), IndexDtype.FP32, torch.float32)
    tables = block_tables(2, len(x))
    caches = KVCaches(spec, CacheSizes(tables.numel(), tables.numel(), 2), "cpu")
    caches.poison()
    frequencies = [inverse_frequencies(config, compressed=compressed) for compressed in (False, True)]
    outputs = []
    for segment in lengths(len(x), chunks):
        inputs = step_inputs([segment], tables)
        metadata = AttentionMetadata.build(inputs, config, *frequencies)
        output = layer(padded(x[segment.start : segment.context]), metadata, caches.layers[0])
        assert output.shape == (len(inputs.positions), config.hidden_size)
        assert not output[inputs.rows :].any()
        outputs.append(output[: inputs.rows])
    return torch.cat(outputs)


def formula(config: ModelConfig, layer: Attention, x: Tensor, **options) -> Tensor:
    frequencies = inverse_frequencies(config, compressed=layer.kind is not LayerKind.SWA)
    return formulas.attention(config, layer, x.double(), frequencies, **options)


def relative(got: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference, relative to what is expected."""
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("chunks", [[61], [1], [23, 5], [9, 1]], ids=str)
@pytest.mark.parametrize("kind", LayerKind)
def test_layer(kind, chunks):
    """Queries, window, compressed keys, the indexer's choice, sinks, inverse RoPE and the grouped output projection."""
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

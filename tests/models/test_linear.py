"""Which linears round their input to FP8 under ``--linear-activation-quant fp8``, and how."""

from __future__ import annotations

import pytest
import torch
from tests.models.formulas import fp8_rounded
from tests.row_splits import ROWS, assert_row_invariant
from tests.session import dummy_model
from tests.tiny import tiny_config
from torch import Tensor

from tetrad.models.linear import ActivationQuant, Linear, quantize_activation

QUANTISED = {
    "attn.wq_a",
    "attn.wq_b",
    "attn.wkv",
    "attn.wo_b",
    "attn.indexer.wq_b",
    "ffn.shared_experts.w1",
    "ffn.shared_experts.w2",
    "ffn.shared_experts.w3",
}
# those that read the rounded input of no linear: fp32 or bf16 in DeepSeek's own code. The gate and the grouped wo_a
# are no modules that are called; tests of experts and attention see to them
NOT_QUANTISED = {
    "attn.wo_a",
    "attn.compressor.wkv",
    "attn.compressor.wgate",
    "attn.indexer.compressor.wkv",
    "attn.indexer.compressor.wgate",
    "attn.indexer.weights_proj",
    "head",
}


def spread(rows: int, channels: int, seed: int = 0) -> Tensor:
    """Values over several powers of two, so that groups have scales of their own and small values are subnormal."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randn(rows, channels, generator=generator) * 3
    return torch.randn(rows, channels, generator=generator) * 2.0**exponent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [64, 128, 129, 300])
def test_formula(channels, dtype):
    """E4M3 in groups of 128 channels, scales rounded up to a power of two; the last group may be short."""
    x = spread(50, channels).to(dtype)
    x[3, :60] = 0
    x[4] = 0
    x[5] *= 1e-6  # below the smallest scale
    x[6] = x[6].sign() * 448  # exactly a power of two times the largest E4M3
    got = quantize_activation(x, ActivationQuant.FP8)
    assert got.dtype == dtype
    assert torch.equal(got.double(), fp8_rounded(x.double(), 128))
    assert not torch.equal(got, x)
    assert quantize_activation(x, ActivationQuant.NONE) is x


@pytest.mark.parametrize("quant", ActivationQuant)
def test_which_linears(quant):
    """Every linear of a model with all kinds of layers, by the name of its weight in the checkpoint."""
    sizes = {"hidden_size": 200, "q_lora_rank": 136, "o_lora_rank": 72, "moe_intermediate_size": 152}
    config = tiny_config("flash", **sizes)
    model = dummy_model(config, quant=quant)
    seen: dict[str, set[int]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        kind, layer = (name.split(".", 2)[2], int(name.split(".")[1])) if "." in name else (name, 0)
        seen.setdefault(kind, set()).add(layer)
        x = spread(5, module.weight.shape[1])
        rounded = quant is ActivationQuant.FP8 and kind in QUANTISED
        weight = module.weight.double().T
        expected = (fp8_rounded(x.double(), 128) if rounded else x.double()) @ weight
        torch.testing.assert_close(module(x).double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        other = (x.double() if rounded else fp8_rounded(x.double(), 128)) @ weight
        assert (other - expected).norm() > 0.005 * expected.norm(), "the comparison would see no difference"
    assert seen.keys() == QUANTISED | NOT_QUANTISED
    assert seen["attn.wq_a"] == seen["ffn.shared_experts.w2"] == set(range(5))
    assert seen["attn.indexer.wq_b"] == {1, 3}
    assert seen["attn.compressor.wkv"] == {1, 2, 3, 4}


def test_compute_dtypes():
    """A bf16 model: its linears answer in bf16; compressors, head weights and the head compute in fp32."""
    model = dummy_model(tiny_config("csa"), dtype=torch.bfloat16)
    layer = model.layers[0]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert layer.attn.wq_a(x).dtype == torch.bfloat16
    for module in (layer.attn.compressor.wkv, layer.attn.indexer.weights_proj, model.head):
        got = module(x.float())
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), x.double() @ module.weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(200, 100), (128, 257), (2048, 24), (33, 130), (66, 24)])
def test_rows_do_not_depend_on_each_other(inputs, outputs, dtype):
    """Products are padded to a multiple of 8 rows and of 4 channels: with 66 channels, several threads round apart."""
    linear = Linear(inputs, outputs, dtype, ActivationQuant.FP8)
    linear.weight.copy_(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)))
    assert_row_invariant(linear, spread(ROWS, inputs).to(dtype))

"""What the unquantised oracle cannot see: each names the tests that must."""

from __future__ import annotations

from tests.mutants.mutant import mutant

ATTENTION = "models/attention.py"
INDEXER = "models/indexer.py"
LINEAR = "models/linear.py"
MOE = "models/moe.py"
KEYS = "ops/index_keys/reference.py"
E8M0 = "formats/e8m0.py"
FP4 = "formats/mxfp4.py"
GEOMETRY = "geometry.py"

_LINEARS = "tests/models/test_linear.py::test_which_linears"
_ROUND_FP8 = "__import__('tetrad.formats.fp8', fromlist=['fp8']).fake_quantize"

MUTANTS = (
    mutant(
        "wkv's input not rounded to FP8",
        *(ATTENTION, "Linear(config.hidden_size, dim, dtype, quant)", "Linear(config.hidden_size, dim, dtype)"),
        test=_LINEARS,
    ),
    mutant(
        "input of the index head weights rounded to FP8",
        INDEXER,
        "Linear(config.hidden_size, self.heads, torch.float32)",
        "Linear(config.hidden_size, self.heads, torch.float32, quant)",
        test=_LINEARS,
    ),
    mutant(
        "wo_a's input rounded to FP8",
        *(ATTENTION, "linear(grouped[:, g], ", f"linear({_ROUND_FP8}(grouped[:, g]), "),
        test="tests/models/test_attention.py::test_linear_activation_quant",
    ),
    mutant(
        "gate's input rounded to FP8",
        *(MOE, "softplus(linear(x.float(), ", f"softplus(linear({_ROUND_FP8}(x.float()), "),
        test="tests/models/test_moe.py::test_linear_activation_quant",
    ),
    mutant(
        "w2's input rounded to FP8 before the routing weight",
        *(MOE, "inner = (inner * weights", "inner = (quantize_activation(inner, self.quant) * weights"),
        *(MOE, "linear(quantize_activation(inner, self.quant), ", "linear(inner, "),
        test="tests/models/test_moe.py::test_linear_activation_quant",
    ),
    mutant(
        "activations in groups of 64",
        *(LINEAR, "ACTIVATION_GROUP = 128", "ACTIVATION_GROUP = 64"),
        test="tests/models/test_linear.py::test_formula",
    ),
    mutant(
        "Hadamard on neither",
        *(KEYS, "rotate(keys) if layout.hadamard else keys", "keys"),
        *(KEYS, "rotate(q) if layout.hadamard else q", "q"),
        test="tests/ops/test_index_keys.py::test_query_equals_the_formula",
    ),
    mutant(
        "index keys not rounded to the compute dtype before their norm",
        *(KEYS, "rms_norm(pooled.to(dtype), norm_weight, eps)", "rms_norm(pooled, norm_weight, eps).to(dtype)"),
        test="tests/ops/test_index_keys.py::test_key_vectors_round_at_every_step",
    ),
    mutant(
        "KV keys in groups of 128",
        *(GEOMETRY, "KV_GROUP = 64", "KV_GROUP = 128"),
        test="tests/ops/test_kv_entries.py::test_every_byte_of_a_page",
    ),
    mutant(
        "FP4 ties away from zero",
        *(FP4, "(magnitude * 2.0).round_()", "(magnitude * 2.0 + 0.5).floor_()"),
        test="tests/formats/test_mxfp4.py::test_ties_go_to_even",
    ),
    mutant(
        "scales rounded down",
        *(E8M0, "exponent + (mantissa > exact).to(torch.int32)", "exponent"),
        test="tests/formats/test_mxfp4.py::test_scale_at_every_edge",
    ),
    mutant(
        "nibbles swapped",
        *(FP4, "codes[..., 0::2] | (codes[..., 1::2] << 4)", "codes[..., 1::2] | (codes[..., 0::2] << 4)"),
        test="tests/formats/test_mxfp4.py::test_pack_puts_the_even_index_low",
    ),
)

"""What the unquantised oracle cannot see: each names the tests that must."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.mutants.mutant import Patch, everywhere, mutant
from tetrad.formats.fp8 import fake_quantize
from tetrad.models.linear import ActivationQuant
from tetrad.ops.rotary import apply_rotary
from tetrad.ops.row_invariant import rms_norm

ATTENTION = "tetrad.models.attention:"
INDEXER = "tetrad.models.indexer:"
MOE = "tetrad.models.moe:"
KEYS = "tetrad.ops.index_keys.reference:"
FP4 = "tetrad.formats.mxfp4:"

_LINEARS = "tests/models/test_linear.py::test_which_linears"


def wkv_not_rounded(init: Any) -> Any:
    def wrong(self, *arguments):
        init(self, *arguments)
        self.wkv.quant = ActivationQuant.NONE

    return wrong


def head_weights_rounded(init: Any) -> Any:
    def wrong(self, *arguments):
        init(self, *arguments)
        self.weights_proj.quant = self.wq_b.quant

    return wrong


def rounded_before_the_weight(forward: Any) -> Any:
    """The expert's output times the weight, in place of the output of what was rounded with it."""

    def wrong(self, x, weights, experts, real):
        picks = zip(weights.split(1, 1), experts.split(1, 1), strict=True)
        return sum(forward(self, x, torch.ones_like(weight), expert, real) * weight for weight, expert in picks)

    return wrong


def norm_of_unrounded_keys(_: Any) -> Any:
    def wrong(pooled, norm_weight, eps, cos, sin, dtype):
        return apply_rotary(rms_norm(pooled, norm_weight, eps).to(dtype), cos, sin)

    return wrong


def ties_away(nearest: Any) -> Any:
    return lambda magnitude: nearest(torch.nextafter(magnitude, torch.full_like(magnitude, torch.inf)))


def rounded_down(_: Any) -> Any:
    return lambda values: (torch.frexp(values).exponent + 126).clamp(0, 255).to(torch.uint8)


def nibbles_swapped(pack: Any) -> Any:
    def wrong(codes: Tensor) -> Tensor:
        packed = pack(codes)
        return (packed << 4) | (packed >> 4)

    return wrong


MUTANTS = (
    mutant("wkv's input not rounded to FP8", Patch(ATTENTION + "Attention.__init__", wkv_not_rounded), test=_LINEARS),
    mutant(
        "input of the index head weights rounded to FP8",
        Patch(INDEXER + "Indexer.__init__", head_weights_rounded),
        test=_LINEARS,
    ),
    mutant(
        "wo_a's input rounded to FP8",
        Patch(ATTENTION + "linear", lambda linear: lambda x, weight: linear(fake_quantize(x), weight)),
        test="tests/models/test_attention.py::test_linear_activation_quant",
    ),
    mutant(
        "gate's input rounded to FP8",
        Patch(MOE + "Gate.forward", lambda forward: lambda self, x, ids: forward(self, fake_quantize(x), ids)),
        test="tests/models/test_moe.py::test_linear_activation_quant",
    ),
    mutant(
        "w2's input rounded to FP8 before the routing weight",
        Patch(MOE + "Experts.forward", rounded_before_the_weight),
        test="tests/models/test_moe.py::test_linear_activation_quant",
    ),
    mutant(
        "activations in groups of 64",
        Patch("tetrad.models.linear:ACTIVATION_GROUP", lambda _: 64),
        test="tests/models/test_linear.py::test_formula",
    ),
    mutant(
        "Hadamard on neither",
        Patch(KEYS + "rotate", lambda _: lambda x: x),
        test="tests/ops/test_index_keys.py::test_query_equals_the_formula",
    ),
    mutant(
        "index keys not rounded to the compute dtype before their norm",
        Patch(KEYS + "index_key_vectors", norm_of_unrounded_keys),
        test="tests/ops/test_index_keys.py::test_key_vectors_round_at_every_step",
    ),
    mutant(
        "KV keys in groups of 128",
        everywhere("tetrad.geometry.addresses:KV_GROUP", lambda _: 128),
        test="tests/ops/test_kv_entries.py::test_every_byte_of_a_page",
    ),
    mutant(
        "FP4 ties away from zero",
        Patch(FP4 + "_nearest_code", ties_away),
        test="tests/formats/test_mxfp4.py::test_ties_go_to_even",
    ),
    mutant(
        "scales rounded down",
        Patch("tetrad.formats.e8m0:encode_ceil", rounded_down),
        test="tests/formats/test_mxfp4.py::test_scale_at_every_edge",
    ),
    mutant(
        "nibbles swapped",
        Patch(FP4 + "pack", nibbles_swapped),
        test="tests/formats/test_mxfp4.py::test_pack_puts_the_even_index_low",
    ),
)

"""Routing and experts against their formulas in fp64, one token and one expert at a time."""

from __future__ import annotations

import math

import pytest
import torch
from tests.models import formulas
from tests.models.steps import Segment, block_tables, padded, step_rows
from tests.row_splits import ROWS, assert_row_invariant
from tests.tiny import tiny_config
from torch import Tensor

from tetrad.models.config import ModelConfig
from tetrad.models.linear import ActivationQuant
from tetrad.models.moe import Gate, MoE, clamped_swiglu

SIZES = {
    "hidden_size": 200,  # one group of 128 channels and a short one
    "moe_intermediate_size": 152,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 0.8,
    "vocab_size": 50,
}


def make_moe(hashed: bool, dtype=torch.float32, quant=ActivationQuant.NONE) -> tuple[ModelConfig, MoE]:
    config = tiny_config("swa", **SIZES)
    moe = MoE(config, hashed, dtype, quant)
    generator = torch.Generator().manual_seed(6)
    for name, parameter in moe.named_parameters():
        if name.endswith("tid2eid"):
            draws = torch.rand(config.vocab_size, config.n_routed_experts, generator=generator)
            parameter.copy_(draws.argsort(1)[:, : config.num_experts_per_tok])
        else:
            size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return config, moe


def inputs(config: ModelConfig, rows: int = 23) -> tuple[Tensor, Tensor]:
    """(x fp32 [rows, D], token ids [rows])."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(rows, config.hidden_size, generator=generator) * 1.5
    return x, torch.randint(0, config.vocab_size, (rows,), generator=generator)


ALL = torch.ones(64, dtype=torch.bool)


def run(moe: MoE, x: Tensor, ids: Tensor) -> Tensor:
    """The layer over a step of these rows alone; NaN in the padding behind them reaches nothing."""
    rows = step_rows([Segment(0, 0, len(x))], block_tables(1, len(x)))
    rows.token[: len(x)] = ids
    return moe(padded(x, rows), rows)[: len(x)]


def routing(config: ModelConfig, gate: Gate, x: Tensor, token: int) -> dict[int, float]:
    """The experts of one token and their weights."""
    scores = [math.sqrt(math.log1p(math.exp(logit))) for logit in (gate.weight.double() @ x.double()).tolist()]
    if gate.tid2eid is not None:
        experts = gate.tid2eid[token].tolist()
    else:
        assert gate.bias is not None
        biased = [score + float(bias) for score, bias in zip(scores, gate.bias, strict=True)]
        experts = sorted(range(len(biased)), key=lambda expert: -biased[expert])[: config.num_experts_per_tok]
    total = sum(scores[expert] for expert in experts)
    return {expert: scores[expert] / total * config.routed_scaling_factor for expert in experts}


def one_expert(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float, weight: float, quant: str) -> Tensor:
    """fp64 [D] of one token. ``quant``: "none"; "weighted", as DeepSeek rounds; "unweighted", before the weight."""
    if quant != "none":
        x = formulas.fp8_rounded(x, 128)
    inner = formulas.clamped_swiglu(w1.double() @ x, w3.double() @ x, limit)
    if quant == "unweighted":
        inner = formulas.fp8_rounded(inner, 128)
    inner = inner * weight
    if quant == "weighted":
        inner = formulas.fp8_rounded(inner, 128)
    return w2.double() @ inner


def formula(config: ModelConfig, moe: MoE, x: Tensor, ids: Tensor, quant: str = "none") -> Tensor:
    """Every token by itself, every expert that it is sent to, and the shared one: fp64 [R, D]."""
    routed, shared = moe.experts, moe.shared_experts
    rows = []
    for row, token in zip(x, ids.tolist(), strict=True):
        weights = (shared.w1.weight, shared.w2.weight, shared.w3.weight)
        y = one_expert(row.double(), *weights, config.swiglu_limit, 1.0, quant)
        for expert, weight in routing(config, moe.gate, row, token).items():
            weights = (routed.w1[expert], routed.w2[expert], routed.w3[expert])
            y = y + one_expert(row.double(), *weights, config.swiglu_limit, weight, quant)
        rows.append(y)
    return torch.stack(rows)


def test_clamped_swiglu():
    """The gate is cut from above only, before silu; the other factor from both sides; bf16 inputs are not rounded."""
    gate = torch.tensor([-500.0, -100.0, -3.0, -0.5, 0.0, 0.5, 2.0, 2.5, 900.0])
    for up in (-7.0, -2.0, -0.3, 0.0, 1.9, 2.0, 80.0):
        got = clamped_swiglu(gate, torch.full_like(gate, up), 2.0)
        expected = formulas.clamped_swiglu(gate.double(), torch.full_like(gate, up).double(), 2.0)
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-30)
    half = torch.tensor([0.3, -1.2]).bfloat16()
    got = clamped_swiglu(half, half, 2.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), formulas.clamped_swiglu(half.double(), half.double(), 2.0), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("hashed", [False, True])
def test_gate(hashed):
    """The bias moves the choice and never the weights; hash layers choose by token id and still weigh by score."""
    config, moe = make_moe(hashed)
    x, ids = inputs(config)
    weights, experts = moe.gate(x, ids)
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int64
    moved = 0
    for row in range(len(x)):
        expected = routing(config, moe.gate, x[row], int(ids[row]))
        assert sorted(experts[row].tolist()) == sorted(expected)
        for weight, expert in zip(weights[row].tolist(), experts[row].tolist(), strict=True):
            assert math.isclose(weight, expected[expert], rel_tol=1e-5)
        best = (moe.gate.weight @ x[row]).topk(config.num_experts_per_tok).indices.tolist()
        moved += sorted(best) != sorted(expected)
    assert moved > 3, "the bias, or the table, must matter for the comparison to mean something"


def test_gate_of_extreme_scores():
    """softplus of a large logit is the logit, of a small one nearly nothing: neither overflows nor divides by zero."""
    config, moe = make_moe(True)
    x, ids = inputs(config)
    for size in (200.0, -200.0):
        # the same logit for every expert: softplus(-2e4) is 0 for all of them
        moe.gate.weight.copy_(size * x[:1].expand_as(moe.gate.weight))
        weights, _ = moe.gate(x[:1], ids[:1])
        assert torch.isfinite(weights).all()
        if size > 0:
            torch.testing.assert_close(weights, torch.full_like(weights, 1.7 / 3))


@pytest.mark.parametrize("hashed", [False, True])
def test_moe(hashed):
    """Routed and shared experts, all clamped, against a loop over tokens."""
    config, moe = make_moe(hashed)
    x, ids = inputs(config)
    torch.testing.assert_close(run(moe, x, ids).double(), formula(config, moe, x, ids), rtol=1e-5, atol=1e-5)


def test_moe_in_bf16_adds_in_fp32():
    """Routed experts are added up in fp32 and rounded once, together with the shared one."""
    config, moe = make_moe(False, torch.bfloat16)
    x, ids = (value.bfloat16() if value.is_floating_point() else value for value in inputs(config))
    got = run(moe, x, ids)
    assert got.dtype == torch.bfloat16
    # every expert's output is rounded to bf16, and so are g, u and the input of w2
    weights, experts = moe.gate(x, ids)
    expected = moe.shared_experts(x).double()
    for row in range(len(x)):
        for weight, expert in sorted(zip(weights[row], experts[row].tolist(), strict=True), key=lambda pair: pair[1]):
            gate, up = (w[expert].double() @ x[row].double() for w in (moe.experts.w1, moe.experts.w3))
            inner = formulas.clamped_swiglu(gate.bfloat16().double(), up.bfloat16().double(), config.swiglu_limit)
            inner = (inner * weight.double()).bfloat16().double()
            expected[row] += (moe.experts.w2[expert].double() @ inner).bfloat16().double()
    # adding up in bf16 would round three times more, and change about half of the values
    assert (got != expected.bfloat16()).double().mean() < 0.02


def test_order_of_the_picks():
    """A token's experts are added in the order of their ids: the order in which top-k names them changes no bit."""
    config, moe = make_moe(False)
    x, ids = inputs(config)
    weights, experts = moe.gate(x, ids)
    expected = moe.experts(x, weights, experts, ALL[: len(x)])
    assert torch.equal(moe.experts(x, weights.flip(1), experts.flip(1), ALL[: len(x)]), expected)


def test_experts_without_tokens_and_with_all():
    """Every token to the same experts: the others have nothing to do, and must not be in the way."""
    config, moe = make_moe(True)
    assert moe.gate.tid2eid is not None
    moe.gate.tid2eid.copy_(torch.tensor([6, 0, 3]).expand_as(moe.gate.tid2eid))
    x, ids = inputs(config)
    moe.experts.w1[[1, 2, 4, 5]] = float("nan")
    torch.testing.assert_close(run(moe, x, ids).double(), formula(config, moe, x, ids), rtol=1e-5, atol=1e-5)


def test_padding_calls_no_expert():
    """Rows without a request give zeros although their input, and so their routing weights, are NaN.

    Nor do they change a bit of the rows beside them; a step of padding alone is nothing special.
    """
    config, moe = make_moe(False)
    x, ids = inputs(config, 13)
    weights, experts = moe.gate(x, ids)
    real = torch.arange(13) % 3 > 0
    expected = moe.experts(x[real], weights[real], experts[real], ALL[: int(real.sum())])
    for values in (x, weights):
        values[~real] = float("nan")
    experts[~real] = 6
    got = moe.experts(x, weights, experts, real)
    assert torch.equal(got[real], expected)
    assert not got[~real].any()
    assert not moe.experts(x, weights, experts, ~ALL[:13]).any()


@pytest.mark.parametrize("hashed", [False, True])
def test_linear_activation_quant(hashed):
    """DeepSeek rounds the input of every w1, w3 and w2 to FP8, that of w2 after the routing weight; not the gate's."""
    config, moe = make_moe(hashed, quant=ActivationQuant.FP8)
    x, ids = inputs(config)
    got = run(moe, x, ids).double()
    expected = formula(config, moe, x, ids, "weighted")

    def relative(other: Tensor) -> float:
        return float((other - expected).norm() / expected.norm())

    # a value at the edge between two codes may fall on the other side in fp32
    assert relative(got) < 1e-3
    assert relative(formula(config, moe, x, ids, "unweighted")) > 5e-3
    assert relative(formula(config, moe, x, ids)) > 5e-3
    gate = Gate(config, hashed)
    gate.load_state_dict(moe.gate.state_dict())
    for mine, plain in zip(moe.gate(x, ids), gate(x, ids), strict=True):
        assert torch.equal(mine, plain)
    rounded, _ = gate(formulas.fp8_rounded(x.double(), 128).float(), ids)
    assert not torch.equal(rounded, moe.gate(x, ids)[0])


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quant"),
    [
        (torch.float32, ActivationQuant.NONE),
        (torch.float32, ActivationQuant.FP8),
        (torch.bfloat16, ActivationQuant.NONE),
    ],
    ids=str,
)
def test_rows_do_not_depend_on_each_other(hashed, dtype, quant):
    """How many tokens an expert gets depends on the whole step; what one of them gets back must not."""
    config, moe = make_moe(hashed, dtype, quant)
    x, ids = inputs(config, ROWS)
    assert_row_invariant(lambda x, ids: run(moe, x, ids), x.to(dtype), ids)

"""Routing, routed experts and the shared one."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MOE = "models/moe.py"

MUTANTS = (
    mutant("shared expert unclamped", MOE, "self.limit = config.swiglu_limit", 'self.limit = float("inf")'),
    mutant("routed experts unclamped", MOE, "config.swiglu_limit, quant", 'float("inf"), quant'),
    mutant("gate with a lower clamp", MOE, "clamp_max(limit)", "clamp(-limit, limit)"),
    mutant(
        "up projection without a lower clamp", MOE, "up.float().clamp(-limit, limit)", "up.float().clamp_max(limit)"
    ),
    mutant("clamp after silu", MOE, "silu(gate.float().clamp_max(limit))", "silu(gate.float()).clamp_max(limit)"),
    mutant(
        "gate and up projection swapped",
        MOE,
        "linear(mine, self.w1[expert]), linear(mine, self.w3[expert])",
        "linear(mine, self.w3[expert]), linear(mine, self.w1[expert])",
    ),
    mutant(
        "hash layers with uniform weights",
        MOE,
        "weights = score.gather(1, experts)",
        "weights = score.gather(1, experts) if self.tid2eid is None else torch.ones(experts.shape)",
    ),
    mutant("hash layers by score", MOE, "self.tid2eid[input_ids]", "torch.topk(score, self.chosen, dim=-1).indices"),
    mutant(
        "weights from biased scores",
        MOE,
        "weights = score.gather(1, experts)",
        "weights = (score if self.bias is None else score + self.bias).gather(1, experts)",
    ),
    mutant("no bias in the choice", MOE, "score + self.bias", "score"),
    mutant("no routed scaling", MOE, " * self.scaling, experts", ", experts"),
    mutant("weights not normalised", MOE, "weights / (weights.sum(-1, keepdim=True) + 1e-20)", "weights"),
    mutant("no square root in the score", MOE, "self.weight)).sqrt()", "self.weight))"),
    mutant("no shared expert", MOE, "(routed + self.shared_experts(x).float())", "routed"),
    mutant(
        "experts added up in bf16",
        *(MOE, "torch.zeros(x.shape, dtype=torch.float32,", "torch.zeros(x.shape, dtype=x.dtype,"),
        *(MOE, "index_add_(0, rows, output.float())", "index_add_(0, rows, output)"),
        test="tests/models/test_moe.py::test_moe_in_bf16_adds_in_fp32",
    ),
)

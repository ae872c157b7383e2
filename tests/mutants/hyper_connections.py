"""The mixing of the residual streams."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MIXING = "models/hyper_connections.py"
MODEL = "models/deepseek_v4.py"

MUTANTS = (
    mutant("comb not transposed", MIXING, "weights.comb[:, j, :, None]", "weights.comb[:, :, j, None]"),
    mutant("no eps in the collapse before a sub-layer", MIXING, "base[:count]) + hc_eps", "base[:count])"),
    mutant("no eps in the collapse before the head", MIXING, "+ base) + hc_eps", "+ base)"),
    mutant(
        "no eps after the row softmax", MIXING, "comb.sum(-1, keepdim=True)).add_(eps)", "comb.sum(-1, keepdim=True))"
    ),
    mutant("no factor 2 in post", MIXING, "2.0 * sigmoid(", "sigmoid("),
    mutant("scale of pre for post", MIXING, "* scale[1]", "* scale[0]"),
    mutant("one Sinkhorn round too many", MIXING, "range(iterations - 1)", "range(iterations)"),
    mutant(
        "columns before rows", MIXING, "comb.sum(-1, keepdim=True)).add_(eps)", "comb.sum(-2, keepdim=True)).add_(eps)"
    ),
    mutant("no norm of the mixes", MIXING, "mean_square(flat) + norm_eps)", "mean_square(flat) * 0 + 1.0)"),
    mutant("no eps in the norm of the mixes", MIXING, "mean_square(flat) + norm_eps)", "mean_square(flat))"),
    mutant(
        "mixing weights of attention for the experts as well",
        MODEL,
        "weights = self._mix(streams, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)",
        "pass",
    ),
)

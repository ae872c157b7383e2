"""The indexer: scores, rotation and choice."""

from __future__ import annotations

from tests.mutants.mutant import mutant

INDEXER = "models/indexer.py"
ATTENTION = "models/attention.py"
KEYS = "ops/index_keys/reference.py"
LOGITS = "ops/indexer_logits/reference.py"

_NORM = "rms_norm(pooled.to(dtype), norm_weight, eps)"

MUTANTS = (
    mutant("no ReLU", LOGITS, "dots.relu_()", "dots"),
    mutant(
        "ReLU after the sum over heads",
        LOGITS,
        "return dots.relu_().mul_(weights.unsqueeze(-1)).sum(1)",
        "return dots.mul_(weights.unsqueeze(-1)).sum(1).relu_()",
    ),
    mutant(
        "head weights not signed",
        *(INDEXER, "self.weights_proj(x) * self.weight_scale", "self.weights_proj(x).abs() * self.weight_scale"),
    ),
    mutant("Hadamard on the query only", KEYS, "rotate(keys) if layout.hadamard else keys", "keys"),
    mutant("Hadamard on the key only", KEYS, "rotate(q) if layout.hadamard else q", "q"),
    mutant(
        "Hadamard before RoPE",
        *(KEYS, "q = apply_rotary(q, cos, sin)", "q = apply_rotary(rotate(q), cos, sin)"),
        *(KEYS, "rotate(q) if layout.hadamard else q", "q"),
    ),
    mutant("no RoPE on index queries", KEYS, "q = apply_rotary(q, cos, sin)", "q = q.clone()"),
    mutant("no RoPE on index keys", KEYS, f"apply_rotary({_NORM}, cos, sin)", _NORM),
    mutant("no norm of index keys", KEYS, _NORM, "pooled.to(dtype)"),
    mutant("norm of index queries", KEYS, "q = apply_rotary(q, ", "q = apply_rotary(rms_norm(q, None, 1e-6), "),
    mutant("index queries with the window's theta", INDEXER, "metadata.compress_rotation", "metadata.window_rotation"),
    mutant(
        "index queries from the latent of the step's first row",
        INDEXER,
        "self.wq_b(q_latent)",
        "self.wq_b(q_latent[:1].expand_as(q_latent))",
    ),
    mutant("the worst entries chosen", INDEXER, "* self.weight_scale", "* -self.weight_scale"),
    mutant(
        "one entry too many chosen",
        *(INDEXER, "config.index_head_dim, config.index_topk", "config.index_head_dim, config.index_topk + 1"),
        *(ATTENTION, "min(self.config.index_topk,", "min(self.config.index_topk + 1,"),
    ),
    mutant(
        "one entry too few chosen",
        *(INDEXER, "config.index_head_dim, config.index_topk", "config.index_head_dim, config.index_topk - 1"),
    ),
)

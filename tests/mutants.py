"""Mistakes that are easily made in this model, each as a change of the package's source text.

A mistake is caught by the comparison with the oracle (``tests.oracle_subset``), or, where unquantised arithmetic on
one short prompt cannot show it, by the tests that it names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """``old``, which must stand exactly once in a file of the package, becomes ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake. ``tests`` are pytest's names of the tests that must see it; none means the oracle subset."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()


def _mutant(name: str, *places: str, tests: tuple[str, ...] = ()) -> Mutant:
    """``places``: file, old and new of every edit, one after the other."""
    return Mutant(name, tuple(Edit(*places[start : start + 3]) for start in range(0, len(places), 3)), tests)


ATTENTION = "models/attention.py"
COMPRESSOR = "models/compressor.py"
INDEXER = "models/indexer.py"
MIXING = "models/hyper_connections.py"
MOE = "models/moe.py"
ROTARY = "models/rotary.py"
STEP = "models/step.py"
OP_ATTENTION = "ops/sparse_attention/reference.py"
OP_COMPRESS = "ops/compress/reference.py"
OP_KEYS = "ops/index_keys/reference.py"
OP_KV = "ops/kv_entries/reference.py"
OP_LOGITS = "ops/indexer_logits/reference.py"
OP_ROTARY = "ops/rotary.py"

_APE = "self.ape[positions % self.ratio]"

_ATTENTION = (
    _mutant("no RoPE on compressed keys", ATTENTION, "apply_rotary(entry, *plan.rotation)", "entry"),
    _mutant(
        "theta of window and compressed layers swapped",
        ATTENTION,
        "if self.kind is LayerKind.SWA else metadata.compress_rotation",
        "if self.kind is not LayerKind.SWA else metadata.compress_rotation",
    ),
    _mutant(
        "queries and window keys of compressed layers with the window's theta",
        ATTENTION,
        "if self.kind is LayerKind.SWA else metadata.compress_rotation",
        "if self.kind is LayerKind.SWA else metadata.window_rotation",
    ),
    _mutant("no inverse RoPE on the output", ATTENTION, "inverse=True", "inverse=False"),
    _mutant("inverse RoPE does not invert", OP_ROTARY, "sin = -sin", "sin = sin"),
    _mutant(
        "no norm of the query heads",
        ATTENTION,
        "apply_rotary(rms_norm(query, None, eps), *rotation)",
        "apply_rotary(query, *rotation)",
    ),
    _mutant("no weight in the key's norm", ATTENTION, "self.kv_norm.weight, eps", "None, eps"),
    _mutant(
        "softmax scale with YaRN's factor",
        ATTENTION,
        "scale=config.head_dim**-0.5",
        "scale=1.277 * config.head_dim**-0.5",
    ),
    _mutant(
        "heads interleaved over the output groups",
        ATTENTION,
        "output.reshape(output.shape[0], config.o_groups, -1)",
        "output.unflatten(1, (-1, config.o_groups)).transpose(1, 2).flatten(2)",
    ),
    _mutant("window one too short", STEP, "config.sliding_window + 1)", "config.sliding_window + 2)"),
    _mutant(
        "window one too long",
        STEP,
        "config.sliding_window + 1)",
        "config.sliding_window)",
        ATTENTION,
        "window = self.config.sliding_window",
        "window = self.config.sliding_window + 1",
    ),
    _mutant(
        "own key not seen", ATTENTION, "positions[: metadata.inputs.rows] + 1", "positions[: metadata.inputs.rows]"
    ),
    _mutant("no sink", OP_ATTENTION, "(total + sink)", "total"),
    _mutant("sink with a value", OP_ATTENTION, "(value / (total + sink))", "((value + sink) / (total + sink))"),
    _mutant("no rescaling of the sums of earlier blocks", OP_ATTENTION, "value = value * rescale", "value = value"),
    _mutant(
        "rotary pairs of halves, not of neighbours", OP_ROTARY, "unflatten(-1, (-1, 2))", "unflatten(-1, (2, -1)).mT"
    ),
    _mutant(
        "RoPE turns the other way",
        OP_ROTARY,
        "(a * cos - b * sin, a * sin + b * cos)",
        "(a * cos + b * sin, b * cos - a * sin)",
    ),
    _mutant("no YaRN", ROTARY, "config.rope_factor == 1.0", "config.rope_factor >= 1.0"),
    _mutant("YaRN in the window layers", ROTARY, "if not compressed or", "if"),
    _mutant(
        "YaRN's ramp the other way",
        ROTARY,
        "frequencies * (1 - ramp) + frequencies / config.rope_factor * ramp",
        "frequencies * ramp + frequencies / config.rope_factor * (1 - ramp)",
    ),
    _mutant("YaRN's ramp ends a channel early", ROTARY, "math.ceil(channel(", "math.floor(channel("),
)

_COMPRESSION = (
    _mutant(
        "position bias added to the value, not to the gate",
        COMPRESSOR,
        f"self.wgate(x.float()) + {_APE}",
        "self.wgate(x.float())",
        COMPRESSOR,
        "(self.wkv(x.float()), gate)",
        f"(self.wkv(x.float()) + {_APE}, gate)",
    ),
    _mutant(
        "position bias added to both",
        COMPRESSOR,
        "(self.wkv(x.float()), gate)",
        f"(self.wkv(x.float()) + {_APE}, gate)",
    ),
    _mutant("no position bias", COMPRESSOR, f" + {_APE}", ""),
    _mutant("position bias one off", COMPRESSOR, "positions % self.ratio", "(positions + 1) % self.ratio"),
    _mutant(
        "overlap halves swapped",
        OP_COMPRESS,
        "x[:, :ratio, :dim], x[:, ratio:, dim:]",
        "x[:, :ratio, dim:], x[:, ratio:, :dim]",
    ),
    _mutant("tokens before the first weigh as much as a gate of 0", OP_COMPRESS, 'float("-inf")', "0.0"),
    _mutant(
        "no overlap of entries",
        OP_COMPRESS,
        "exists = in_step | in_state",
        "exists = (in_step | in_state).clone(); exists[:, : exists.shape[1] // 2] &= not overlap",
    ),
    _mutant("compressed position m*j + m - 1", STEP, "angles(entry * ratio, ", "angles(entry * ratio + ratio - 1, "),
    _mutant("compressed position j", STEP, "angles(entry * ratio, ", "angles(entry, "),
    _mutant("CSA entries visible a token late", STEP, "(positions + 1) // CSA_RATIO", "positions // CSA_RATIO"),
    _mutant("HCA entries visible a token late", STEP, "(positions + 1) // hca_ratio", "positions // hca_ratio"),
    _mutant("entries made a token late", STEP, "segment.context // ratio)", "(segment.context - 1) // ratio)"),
    _mutant(
        "sources one token early", STEP, "np.arange(ratio - ring, ratio)", "np.arange(ratio - ring - 1, ratio - 1)"
    ),
    _mutant("state ring read one off", STEP, "kept + source % ring", "kept + (source + 1) % ring"),
    _mutant("state ring written one off", STEP, "kept + remembered % ring", "kept + (remembered + 1) % ring"),
    # a ring of 2m or m tokens has one to spare: the oldest is never asked for
    _mutant("too few tokens remembered", STEP, "segment.context - ring)", "segment.context - ring + 2)"),
    _mutant(
        "state shared by all requests of a step",
        STEP,
        "kept = segment.state_slot * ring",
        "kept = 0",
        tests=("tests/models/test_compressor.py::test_requests_keep_their_states_apart",),
    ),
)

_INDEXING = (
    _mutant("no ReLU", OP_LOGITS, "dots.relu_()", "dots"),
    _mutant(
        "head weights not signed",
        INDEXER,
        "self.weights_proj(x) * self.weight_scale",
        "self.weights_proj(x).abs() * self.weight_scale",
    ),
    _mutant(
        "Hadamard on the query only",
        OP_KEYS,
        "hadamard.rotate(apply_rotary(rms_norm(pooled.to(dtype), norm_weight, eps), cos, sin))",
        "apply_rotary(rms_norm(pooled.to(dtype), norm_weight, eps), cos, sin)",
    ),
    _mutant(
        "Hadamard on the key only",
        OP_KEYS,
        "encode(hadamard.rotate(apply_rotary(q, cos, sin)), ",
        "encode(apply_rotary(q, cos, sin), ",
    ),
    _mutant(
        "Hadamard before RoPE",
        OP_KEYS,
        "hadamard.rotate(apply_rotary(q, cos, sin))",
        "apply_rotary(hadamard.rotate(q), cos, sin)",
    ),
    _mutant("no RoPE on index queries", OP_KEYS, "apply_rotary(q, cos, sin)", "q"),
    _mutant(
        "no RoPE on index keys",
        OP_KEYS,
        "apply_rotary(rms_norm(pooled.to(dtype), norm_weight, eps), cos, sin)",
        "rms_norm(pooled.to(dtype), norm_weight, eps)",
    ),
    _mutant("no norm of index keys", OP_KEYS, "rms_norm(pooled.to(dtype), norm_weight, eps)", "pooled.to(dtype)"),
    _mutant(
        "index queries with the window's theta", INDEXER, "*metadata.compress_rotation", "*metadata.window_rotation"
    ),
    _mutant(
        "one entry too many chosen",
        INDEXER,
        "self.head_dim, config.index_topk",
        "self.head_dim, config.index_topk + 1",
        ATTENTION,
        "min(self.config.index_topk, metadata.index_width)",
        "min(self.config.index_topk + 1, metadata.index_width)",
    ),
    _mutant(
        "one entry too few chosen", INDEXER, "self.head_dim, config.index_topk", "self.head_dim, config.index_topk - 1"
    ),
    _mutant("the worst entries chosen", INDEXER, "* self.weight_scale", "* -self.weight_scale"),
)

_EXPERTS = (
    _mutant("shared expert unclamped", MOE, "self.limit = config.swiglu_limit", 'self.limit = float("inf")'),
    _mutant("routed experts unclamped", MOE, "config.swiglu_limit, quant", 'float("inf"), quant'),
    _mutant("gate with a lower clamp", MOE, "clamp_max(limit)", "clamp(-limit, limit)"),
    _mutant(
        "up projection without a lower clamp", MOE, "up.float().clamp(-limit, limit)", "up.float().clamp_max(limit)"
    ),
    _mutant(
        "gate and up swapped",
        MOE,
        "linear(mine, self.w1[expert]), linear(mine, self.w3[expert])",
        "linear(mine, self.w3[expert]), linear(mine, self.w1[expert])",
    ),
    _mutant(
        "hash layers with uniform weights",
        MOE,
        "weights = score.gather(1, experts)",
        "weights = score.gather(1, experts) if self.tid2eid is None else torch.ones(experts.shape)",
    ),
    _mutant(
        "weights from biased scores",
        MOE,
        "weights = score.gather(1, experts)",
        "weights = (score if self.bias is None else score + self.bias).gather(1, experts)",
    ),
    _mutant("no bias in the choice", MOE, "score + self.bias", "score"),
    _mutant("hash layers by score", MOE, "self.tid2eid[input_ids]", "torch.topk(score, self.chosen, dim=-1).indices"),
    _mutant("no routed scaling", MOE, " * self.scaling, experts", ", experts"),
    _mutant("weights not normalised", MOE, "weights / (weights.sum(-1, keepdim=True) + 1e-20)", "weights"),
    _mutant(
        "no square root in the score",
        MOE,
        "softplus(linear(x.float(), self.weight)).sqrt()",
        "softplus(linear(x.float(), self.weight))",
    ),
    _mutant("no shared expert", MOE, "(routed + self.shared_experts(x).float())", "routed"),
)

_HYPER_CONNECTIONS = (
    _mutant("comb not transposed", MIXING, "weights.comb[:, j, :, None]", "weights.comb[:, :, j, None]"),
    _mutant(
        "no eps in the collapse before a sub-layer",
        MIXING,
        "* scale[0] + base[:count]) + hc_eps",
        "* scale[0] + base[:count])",
    ),
    _mutant("no eps in the collapse before the head", MIXING, "* scale[0] + base) + hc_eps", "* scale[0] + base)"),
    _mutant("no eps after the row softmax", MIXING, "comb / _row_sum(comb) + eps", "comb / _row_sum(comb)"),
    _mutant("no factor 2 in post", MIXING, "2.0 * sigmoid(", "sigmoid("),
    _mutant("scale of pre for post", MIXING, "* scale[1]", "* scale[0]"),
    _mutant("one Sinkhorn round too many", MIXING, "range(iterations - 1)", "range(iterations)"),
    _mutant("columns before rows", MIXING, "comb / _row_sum(comb) + eps", "comb / _column_sum(comb) + eps"),
    _mutant("no norm of the mixes", MIXING, "keepdim=True) + norm_eps)", "keepdim=True) * 0 + 1.0)"),
    _mutant("no eps in the norm of the mixes", MIXING, "keepdim=True) + norm_eps)", "keepdim=True))"),
)

# what fp32 on one short prompt cannot show
_QUANTISED: tuple[Mutant, ...] = ()

MUTANTS = (*_ATTENTION, *_COMPRESSION, *_INDEXING, *_EXPERTS, *_HYPER_CONNECTIONS, *_QUANTISED)

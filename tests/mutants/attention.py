"""Queries, keys, window, sinks, output projection and rotation."""

from __future__ import annotations

from tests.mutants.mutant import mutant

ATTENTION = "models/attention.py"
ANGLES = "models/rotary.py"
STEP = "models/step.py"
OP = "ops/sparse_attention/reference.py"
ROTATE = "ops/rotary.py"

MUTANTS = (
    mutant("no RoPE on compressed keys", ATTENTION, "apply_rotary(entry, *plan.rotation)", "entry"),
    mutant(
        "theta of window and compressed layers swapped",
        *(ATTENTION, "if self.kind is LayerKind.SWA else", "if self.kind is not LayerKind.SWA else"),
    ),
    mutant(
        "queries and window keys of compressed layers with the window's theta",
        *(ATTENTION, "if self.kind is LayerKind.SWA else", "if True else"),
    ),
    mutant("no inverse RoPE on the output", ATTENTION, "inverse=True", "inverse=False"),
    mutant("rotary pairs of halves, not of neighbours", ROTATE, "unflatten(-1, (-1, 2))", "unflatten(-1, (2, -1)).mT"),
    mutant(
        "RoPE turns the other way",
        *(ROTATE, "(a * cos - b * sin, a * sin + b * cos)", "(a * cos + b * sin, b * cos - a * sin)"),
    ),
    mutant("RoPE on the first channels", ROTATE, "x[..., x.shape[-1] - rope :].float()", "x[..., :rope].float()"),
    mutant("no YaRN", ANGLES, "config.rope_factor == 1.0", "config.rope_factor >= 1.0"),
    mutant("YaRN in the window layers", ANGLES, "if not compressed or", "if"),
    mutant("YaRN's ramp the other way", ANGLES, "- low) / width).clamp(0, 1)", "- low) / -width + 1).clamp(0, 1)"),
    mutant("YaRN's ramp ends a channel early", ANGLES, "math.ceil(channel(", "math.floor(channel("),
    mutant(
        "angles in fp64",
        *(ANGLES, "angle = positions.float()", "angle = positions.double()"),
        *(ANGLES, "torch.cos(angle), torch.sin(angle)", "torch.cos(angle).float(), torch.sin(angle).float()"),
        test="tests/models/test_rotary.py::test_angle_is_an_fp32_product",
    ),
    mutant("no norm of the query heads", ATTENTION, "rms_norm(query, None, eps)", "query"),
    mutant("no weight in the key's norm", ATTENTION, "self.kv_norm.weight", "None"),
    mutant("softmax scaled by YaRN", ATTENTION, "scale=config.head_dim**-0.5", "scale=1.277 * config.head_dim**-0.5"),
    mutant(
        "heads interleaved over the output groups",
        ATTENTION,
        "output.reshape(output.shape[0], config.o_groups, -1)",
        "output.unflatten(1, (-1, config.o_groups)).transpose(1, 2).flatten(2)",
    ),
    mutant("window one too short", STEP, "config.sliding_window + 1)", "config.sliding_window + 2)"),
    mutant(
        "window one too long",
        *(STEP, "config.sliding_window + 1)", "config.sliding_window)"),
        *(ATTENTION, "window = self.config.sliding_window", "window = self.config.sliding_window + 1"),
    ),
    mutant("own key not seen", ATTENTION, "positions[: metadata.inputs.rows] + 1", "positions[: metadata.inputs.rows]"),
    mutant("no sink", OP, "(total + sink)", "total"),
    mutant("sink with a value", OP, "(value / (total + sink))", "((value + sink) / (total + sink))"),
    mutant("sums of earlier blocks not rescaled", OP, "value = value * rescale", "value = value"),
)

"""The compressors: pooling, positions, visibility and the state between steps."""

from __future__ import annotations

from tests.mutants.mutant import mutant

COMPRESSOR = "models/compressor.py"
STEP = "models/step.py"
OP = "ops/compress/reference.py"

_OWN = """def _own(rows, overlap):
    return (torch.arange(rows.shape[1]) >= rows.shape[1] // 2 * overlap)[:, None, None]


"""
_BIAS = "self.ape[positions % self.ratio]"

MUTANTS = (
    mutant(
        "position bias added to the value, not to the gate",
        *(COMPRESSOR, f"self.wgate(x.float()) + {_BIAS}", "self.wgate(x.float())"),
        *(COMPRESSOR, "(self.wkv(x.float()), gate)", f"(self.wkv(x.float()) + {_BIAS}, gate)"),
    ),
    mutant(
        "position bias added to both",
        *(COMPRESSOR, "(self.wkv(x.float()), gate)", f"(self.wkv(x.float()) + {_BIAS}, gate)"),
    ),
    mutant("no position bias", COMPRESSOR, f" + {_BIAS}", ""),
    mutant("position bias one off", COMPRESSOR, "positions % self.ratio", "(positions + 1) % self.ratio"),
    mutant(
        "overlap halves swapped",
        *(OP, "x[:, :ratio, :dim], x[:, ratio:, dim:]", "x[:, :ratio, dim:], x[:, ratio:, :dim]"),
    ),
    mutant("one half of the channels for both blocks", OP, "x[:, ratio:, dim:]", "x[:, ratio:, :dim]"),
    mutant(
        "no overlap",
        *(OP, "exists = in_step | in_state", "exists = (in_step | in_state) & _own(source_rows, overlap)"),
        *(OP, "def _halves(", f"{_OWN}def _halves("),
    ),
    mutant("tokens before the first weigh as a gate of 0", OP, 'float("-inf")', "0.0"),
    mutant("one gate for all channels", OP, "torch.exp(gate -", "torch.exp(gate.mean(-1, keepdim=True) -"),
    mutant("compressed position m*j + m - 1", STEP, "angles(entries * ratio, ", "angles(entries * ratio + ratio - 1, "),
    mutant("compressed position j", STEP, "angles(entries * ratio, ", "angles(entries, "),
    mutant("CSA entries visible a token late", STEP, "(positions + 1) // CSA_RATIO", "positions // CSA_RATIO"),
    mutant("HCA entries visible a token late", STEP, "(positions + 1) // hca_ratio", "positions // hca_ratio"),
    mutant("HCA entries visible a token early", STEP, "(positions + 1) // hca_ratio", "(positions + 2) // hca_ratio"),
    mutant(
        "entries made a token late",
        *(STEP, "context // ratio - start // ratio", "(context - 1) // ratio - np.maximum(start - 1, 0) // ratio"),
        *(STEP, "start[request] // ratio", "np.maximum(start - 1, 0)[request] // ratio"),
    ),
    mutant("sources one token early", STEP, "np.arange(ratio - ring, ratio)", "np.arange(-1 - ring, -1) + ratio"),
    mutant("state read one off", STEP, "ring + source % ring", "ring + (source + 1) % ring"),
    mutant("state written one off", STEP, "ring + position % ring", "ring + (position + 1) % ring"),
    # a ring has one place to spare: the oldest of its 2m or m tokens is never asked for
    mutant(
        "too few tokens remembered",
        *(STEP, "_ragged(np.minimum(count, ring))", "_ragged(np.minimum(count, ring - 2))"),
        *(STEP, "(context - np.minimum(count, ring))", "(context - np.minimum(count, ring - 2))"),
    ),
    mutant(
        "state written before it is read",
        COMPRESSOR,
        "# entries read the state as the previous step left it",
        "update_state(step, state, plan.state_rows, plan.state_places)",
    ),
    mutant(
        "one state for all requests",
        *(STEP, "slot[request, None] * ring", "0 * ring"),
        *(STEP, "slot[kept] * ring", "0 * ring"),
        test="tests/models/test_compressor.py::test_requests_keep_their_states_apart",
    ),
    mutant(
        "tokens of the slot's last owner in the first entry",
        *(STEP, "here | (source < 0)", "here"),
        test="tests/models/test_compressor.py::test_a_state_that_another_sequence_left",
    ),
)

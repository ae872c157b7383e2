"""Mistakes that are easily made in this model, each as a change of the package's source text.

A mistake is caught by the comparison with the oracle (``tests.oracle_subset``), or, where unquantised arithmetic
cannot show it, by the tests it names.
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


def _mutant(name: str, *edit: str, tests: str | tuple[str, ...] = ()) -> Mutant:
    """``edit``: file, old, new, and again for every further place."""
    edits = tuple(Edit(*edit[place : place + 3]) for place in range(0, len(edit), 3))
    return Mutant(name, edits, (tests,) if isinstance(tests, str) else tests)


ATTENTION = "models/attention.py"
COMPRESSOR = "models/compressor.py"
INDEXER = "models/indexer.py"
LINEAR = "models/linear.py"
MIXING = "models/hyper_connections.py"
MODEL = "models/deepseek_v4.py"
MOE = "models/moe.py"
NAMES = "models/checkpoint/names.py"
ROTARY = "models/rotary.py"
STEP = "models/step.py"
OP_ATTENTION = "ops/sparse_attention/reference.py"
OP_COMPRESS = "ops/compress/reference.py"
OP_KEYS = "ops/index_keys/reference.py"
OP_KV = "ops/kv_entries/reference.py"
OP_LOGITS = "ops/indexer_logits/reference.py"
OP_ROTARY = "ops/rotary.py"
ROWS = "ops/row_invariant.py"

_ATTENTION = (
    _mutant("no RoPE on compressed keys", COMPRESSED_ROPE := ATTENTION, "apply_rotary(entry, *plan.rotation)", "entry"),
)

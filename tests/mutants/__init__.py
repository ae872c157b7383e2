"""Mistakes that are easily made in this model, each as behaviour that is replaced at run time.

A function, a method or a constant of the package becomes one that is wrong in one way, so that a mistake outlives a
change of the code around it. It must be noticed by the comparison with the oracle (``tests.oracle_subset``) or, where
one short prompt in fp32 cannot show it, by the tests that it names. ``tests/mutations.py`` makes them one by one.
"""

from __future__ import annotations

from tests.mutants import attention, compression, experts, hyper_connections, indexer, quantisation
from tests.mutants.mutant import Mutant, Patch

__all__ = ["CONTROLS", "MUTANTS", "Mutant", "Patch"]

MUTANTS: tuple[Mutant, ...] = (
    *attention.MUTANTS,
    *compression.MUTANTS,
    *indexer.MUTANTS,
    *experts.MUTANTS,
    *hyper_connections.MUTANTS,
    *quantisation.MUTANTS,
)

CONTROLS: tuple[Mutant, ...] = (
    *attention.CONTROLS,
    *compression.CONTROLS,
    *experts.CONTROLS,
    *hyper_connections.CONTROLS,
)
"""What is replaced without a mistake: nothing may notice, else a mutant made in the same way is killed for nothing."""

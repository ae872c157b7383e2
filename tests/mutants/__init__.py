"""Mistakes that are easily made in this model, each as a change of the package's source text.

A mistake must be noticed by the comparison with the oracle (``tests.oracle_subset``) or, where one short prompt in
fp32 cannot show it, by the tests that it names. ``tests/mutations.py`` makes them one by one.
"""

from __future__ import annotations

from tests.mutants import attention, compression, experts, hyper_connections, indexer, quantisation
from tests.mutants.mutant import Edit, Mutant

__all__ = ["MUTANTS", "Edit", "Mutant"]

MUTANTS: tuple[Mutant, ...] = (
    *attention.MUTANTS,
    *compression.MUTANTS,
    *indexer.MUTANTS,
    *experts.MUTANTS,
    *hyper_connections.MUTANTS,
    *quantisation.MUTANTS,
)

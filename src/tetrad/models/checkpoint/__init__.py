"""Checkpoints: which tensors a model has, reading them, writing small ones, inventing them."""

from __future__ import annotations

from tetrad.models.checkpoint.dummy import dummy_state, fill_dummy
from tetrad.models.checkpoint.reader import load_checkpoint
from tetrad.models.checkpoint.tensors import TensorKind, TensorSpec, expected_tensors
from tetrad.models.checkpoint.writer import write_checkpoint

__all__ = [
    "TensorKind",
    "TensorSpec",
    "dummy_state",
    "expected_tensors",
    "fill_dummy",
    "load_checkpoint",
    "write_checkpoint",
]

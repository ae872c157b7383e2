"""Checkpoints: which tensors a model has, how large they are, reading them, writing small ones, inventing them."""

from __future__ import annotations

from tetrad.models.checkpoint.dummy import dummy_state, fill_dummy
from tetrad.models.checkpoint.reader import load_checkpoint
from tetrad.models.checkpoint.sizes import WeightBytes, weight_bytes
from tetrad.models.checkpoint.tensors import TensorKind, TensorSpec, expected_tensors
from tetrad.models.checkpoint.writer import write_checkpoint

__all__ = [
    "TensorKind",
    "TensorSpec",
    "WeightBytes",
    "dummy_state",
    "expected_tensors",
    "fill_dummy",
    "load_checkpoint",
    "weight_bytes",
    "write_checkpoint",
]

"""For every test: one thread (several workers share the cores) and the same examples on every run."""

from __future__ import annotations

import os

# Threads that spin while they wait for one another take the cores from the other workers: a test with two threads took
# a minute instead of a second. Read when torch loads its thread pool, so it stands before the import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

"""Tests that need a Hopper device."""

from __future__ import annotations

import pytest
import torch

from tetrad.ops import nvrtc

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NO_HOPPER = "needs a Hopper GPU (compute capability 9.0) and cuda-core"


def on_hopper(test):
    """Its twin in the emulator runs everywhere."""
    missing = not HOPPER or nvrtc.unavailable() is not None
    test = pytest.mark.usefixtures("all_proven")(test)
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason=NO_HOPPER)(test))

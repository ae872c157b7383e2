"""How the arithmetic here keeps apart from what a program has told torch: autocast, inference mode, fp32 precision.

Default dtypes and devices need nothing of this: every tensor is made with its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_DEVICES = ("cpu", "cuda")
_FP32_PRODUCTS = (
    torch.backends.mkldnn.matmul,  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cuda.matmul,
)


def without_autocast(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make the function compute in the dtypes that its docstring names, also for a caller inside ``torch.autocast``."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not any(map(torch.is_autocast_enabled, _DEVICES)):
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, _DEVICES):
                stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return call


def undisturbed(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make the function compute as if torch had been told nothing, and without gradients.

    Outside of autocast and of inference mode, whose tensors could not be written to later; with fp32 products in fp32,
    whatever ``torch.set_float32_matmul_precision`` allows. That precision belongs to the process: it is set while the
    function runs and then given back.
    """
    without = without_autocast(function)

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with torch.inference_mode(False), torch.no_grad(), _exact_fp32_products():
            return without(*args, **kwargs)

    return call


@contextlib.contextmanager
def _exact_fp32_products() -> Iterator[None]:
    before = [product.fp32_precision for product in _FP32_PRODUCTS]
    try:
        for product in _FP32_PRODUCTS:
            product.fp32_precision = "ieee"
        yield
    finally:
        for product, precision in zip(_FP32_PRODUCTS, before, strict=True):
            product.fp32_precision = precision

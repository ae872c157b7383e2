"""CUDA C++ compiled while the program runs, through NVRTC with NVIDIA's ``cuda-core`` package. Use::

    SOURCE = 'extern "C" __global__ void twice(float* data, int count) { ... }'

    kernel = cuda_kernel(SOURCE, "twice", tensor.device, defines=(("TILE", 128),), shared_bytes=100_000)
    kernel.launch((blocks,), (256,), tensor, tensor.numel())

``cuda_kernel`` compiles on its first call and looks up afterwards. A launch goes to torch's current stream of the
kernel's device, allocates nothing and waits for nothing, so it can be captured into a CUDA graph (after one call
outside of it, which compiles). The source stands alone: kernels are ``extern "C"``, no header is included, a
thread-block cluster is asked for with ``__cluster_dims__`` in the source. This module can be imported everywhere; only
compiling needs the package and a device.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tetrad.errors import ConfigError

__all__ = ["EARLY_START", "CudaKernel", "can_start_early", "compile_cubin", "cuda_kernel", "unavailable"]

_OPT_IN_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory above which a kernel has to ask the driver."""

_seen = threading.local()


def unavailable() -> str | None:
    """Why CUDA C++ cannot be compiled here, or None if it can. Imports nothing and asks no device."""
    if torch.version.hip:
        return "this build of torch is for AMD devices; CUDA C++ needs an NVIDIA one"
    try:
        found = importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        found = False
    return None if found else "the cuda-core package is not installed; pip install 'tetrad[cuda]' brings it"


EARLY_START = """
// A kernel that is compiled with early_start may begin while the one before it in the stream still runs. What that one
// writes, and what it reads that this one writes, is out of bounds until wait_for_kernels_before() returns.
__device__ __forceinline__ void wait_for_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// From when all thread blocks have said this, or ended, the next kernel's may take the place of those that have ended.
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" :::); }

"""
"""Source that stands before that of a kernel with an early start; from Hopper on. Without one both do nothing."""


class CudaKernel:
    """A compiled kernel on one device."""

    def __init__(self, kernel: Any, code: Any, device: int, shared_bytes: int, early_start: bool) -> None:
        self._core = _cuda_core()
        self._kernel = kernel
        # unloading the code would invalidate the kernel
        self._code = code
        self.device = device
        self.shared_bytes = shared_bytes
        # otherwise it starts when the kernel before has ended
        early_start = early_start and can_start_early(self._core)
        self._options = {"programmatic_stream_serialization": True} if early_start else {}
        self._configs: dict[tuple, Any] = {}
        # torch's streams live as long as the process, and cuda-core does not own what it wraps
        self._streams: dict[int, Any] = {}

    def launch(self, grid: Sequence[int], block: Sequence[int], *arguments: Tensor | int | float) -> None:
        """Start the kernel on torch's current stream of its device.

        Args:
            grid: blocks in x, y, z (missing ones are 1), also where the kernel has cluster dimensions
            block: threads in x, y, z
            arguments: tensors go in as their address, ints as 32 or 64 bits as the kernel declares, floats as fp32
        """
        with torch.cuda.device(self.device):
            _make_current(self.device)
            key = (*grid, -1, *block)
            config = self._configs.get(key)
            if config is None:
                sizes = {"grid": (*grid, 1, 1)[:3], "block": (*block, 1, 1)[:3]}
                config = self._core.LaunchConfig(**sizes, shmem_size=self.shared_bytes, **self._options)
                self._configs[key] = config
            stream = self._stream(torch.cuda.current_stream(self.device).cuda_stream)
            self._core.launch(stream, config, self._kernel, *map(_argument, arguments))

    def _stream(self, handle: int) -> Any:
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self._core.Stream.from_handle(handle)
        return stream


@functools.cache
def cuda_kernel(
    source: str,
    name: str,
    device: torch.device,
    *,
    defines: tuple[tuple[str, int | str], ...] = (),
    shared_bytes: int = 0,
    max_registers: int | None = None,
    early_start: bool = False,
) -> CudaKernel:
    """The kernel ``name`` of a CUDA C++ source, compiled for ``device``; the same object for the same arguments.

    Args:
        defines: macros (name, value)
        shared_bytes: dynamic shared memory of every launch; more than 48 KiB is asked for here
        max_registers: a limit for each thread
        early_start: the source begins with :data:`EARLY_START` and keeps to it

    Raises:
        ConfigError: where nothing can be compiled, or the device has less shared memory
    """
    assert not early_start or source.startswith(EARLY_START), "it would run into the kernel before it"
    index = device.index if device.index is not None else torch.cuda.current_device()
    with torch.cuda.device(index):
        _make_current(index)
        code = _compile(source, _architecture(index), defines, max_registers)
        kernel = code.get_kernel(name)
        if shared_bytes > _OPT_IN_SHARED_BYTES:
            limit = torch.cuda.get_device_properties(index).shared_memory_per_block_optin
            if shared_bytes > limit:
                raise ConfigError(
                    f"the kernel {name} needs {shared_bytes} bytes of shared memory; {device} has {limit}"
                )
            _allow_shared(kernel, index, shared_bytes)
        return CudaKernel(kernel, code, index, shared_bytes, early_start)


def compile_cubin(
    source: str, architecture: str, *, defines: tuple[tuple[str, int | str], ...] = (), max_registers: int | None = None
) -> bytes:
    """Machine code for an architecture such as "sm_90a"; needs the package but no device.

    Raises:
        ConfigError: where nothing can be compiled
    """
    return bytes(_compile(source, architecture, defines, max_registers).code)


@functools.cache
def _compile(source: str, architecture: str, defines: tuple, max_registers: int | None) -> Any:
    core = _cuda_core()
    macros = [(name, str(value)) for name, value in defines]
    options = core.ProgramOptions(
        arch=architecture,
        std="c++17",
        define_macro=macros or None,
        max_register_count=max_registers,
        # lambdas have no word for where they run, and NVRTC before 13.5 asks for one of generic lambdas
        device_as_default_execution_space=True,
    )
    return core.Program(source, "c++", options).compile("cubin")


@functools.cache
def _cuda_core() -> ModuleType:
    reason = unavailable()
    if reason is not None:
        raise ConfigError(reason)
    module = importlib.import_module("cuda.core")
    # before its first stable release the package kept its names one level down
    return module if hasattr(module, "Program") else importlib.import_module("cuda.core.experimental")


def _architecture(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    # from Hopper on, the matrix instructions are named only by the architecture's own target
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def can_start_early(core: Any) -> bool:
    """Whether ``core``, the cuda.core module, can ask for it (early releases cannot), and this driver can capture it
    into a CUDA graph, which takes one for CUDA 12.3."""
    if not hasattr(core.LaunchConfig, "programmatic_stream_serialization"):
        return False
    error, version = importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()
    return not int(error) and version >= 12030


def _make_current(index: int) -> None:
    """A thread that never called into CUDA has no context yet, and the driver's launch would fail."""
    devices = _seen.__dict__.setdefault("devices", set())
    if index not in devices:
        _cuda_core().Device(index).set_current()
        devices.add(index)


def _allow_shared(kernel: Any, index: int, shared_bytes: int) -> None:
    driver = importlib.import_module("cuda.bindings.driver")
    handle = getattr(kernel, "handle", None) or kernel._handle
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    error, device = driver.cuDeviceGet(index)
    if not int(error):
        (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, driver.CUkernel(int(handle)), device)
    if int(error):
        raise RuntimeError(f"the driver refused {shared_bytes} bytes of shared memory: {error}")


def _argument(value: Tensor | int | float) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return ctypes.c_float(value) if isinstance(value, float) else value

"""DeepGEMM's indexer as a peer: FP8 scores out of the same pages, and the schedule of its decode kernel.

Its public calls are ``get_paged_mqa_logits_metadata`` for the schedule and, depending on the release,

    fp8_paged_mqa_logits(q, ...)                 fp8_mqa_logits(q, ...)            the older names
    fp8_fp4_paged_mqa_logits((q, None), ...)     fp8_fp4_mqa_logits((q, None), ...)   release 2.8; None: q has no scales

for decode and for prefill. The older ones clean what a row does not see unless told ``clean_logits=False``; 2.8 has no
such argument. Its prefill takes the greatest number of entries that a row sees instead, and returns rows that begin at
their own first entry; here every row begins at entry 0, so the columns are the same. A release between the two has the
new names with the old argument.

Pages are laid out like ours: 64 E4M3 keys, then their 64 fp32 scales. FP8 queries have no scales there, so these go
into the head weights: relu(c * x) = c * relu(x) for c > 0. Prefill wants keys and scales in one piece each. Both
conversions are done before the clock starts, as an engine built on it would have its data in that form.

Its kernels can start before the one in front of them has ended ("early start", programmatic dependent launch), as ours
always do. Releases that have the switch, ``set_pdl``, are timed with it on, and the table says so.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from tetrad.bench.cases import Case, Kind, Op
from tetrad.bench.inputs import InputSet
from tetrad.bench.peers import Peer
from tetrad.bench.timing import Call
from tetrad.errors import ConfigError
from tetrad.geometry import IndexDtype, ceil_div, data_rows, scale_rows

_HEAD_DIMS = (32, 64, 128)
_MULTICAST_ROWS = 4
"""With so many rows a request its Hopper kernel runs in clusters of two, which share one place in the schedule."""


class DeepGemm(Peer):
    """See the module.

    Raises:
        ConfigError: the device is no GPU, DeepGEMM is not installed, or its release has none of the known calls.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError("--peer deep_gemm needs a GPU; DeepGEMM has no CPU kernels")
        try:
            module = importlib.import_module("deep_gemm")
        except Exception as error:  # its import compiles and loads, and can fail in any way
            raise ConfigError(
                f"--peer deep_gemm needs DeepGEMM, which cannot be imported ({type(error).__name__}: {error}); install "
                f"it from https://github.com/deepseek-ai/DeepGEMM (git clone --recursive, then ./install.sh)"
            ) from error
        super().__init__("deep_gemm", module)
        self._paged = _Scorer(module, "paged_mqa_logits")
        self._contiguous = _Scorer(module, "mqa_logits")
        self._clusters = torch.cuda.get_device_capability(device)[0] == 9

    def note(self, case: Case) -> str:
        notes = ["early start on" if self._has_early_start else "no early start"]
        if case.op is Op.SCORE and case.shape.kind is Kind.PREFILL:
            notes.append("contiguous keys")
        return ", ".join(notes)

    def chosen(self) -> AbstractContextManager[None]:
        return self._early_start() if self._has_early_start else contextlib.nullcontext()

    @property
    def _has_early_start(self) -> bool:
        return callable(getattr(self._module, "set_pdl", None))

    @contextlib.contextmanager
    def _early_start(self) -> Iterator[None]:
        """On inside, and as it was afterwards."""
        get = getattr(self._module, "get_pdl", None)
        before = bool(get()) if callable(get) else False
        self._module.set_pdl(True)
        try:
            yield
        finally:
            self._module.set_pdl(before)

    def refusal(self, case: Case) -> str | None:
        if case.op in (Op.TOPK, Op.TOTAL):
            return "it has no top-k"
        if case.op is Op.PLAN:
            return None if case.shape.kind is Kind.DECODE else "its prefill has no plan"
        if case.dtype is not IndexDtype.FP8:
            return f"only its FP8 kernels are adapted, not {case.dtype}"
        if case.head_dim not in _HEAD_DIMS:
            return f"it scores {', '.join(map(str, _HEAD_DIMS))} channels, not {case.head_dim}"
        return None

    def call(self, inputs: InputSet) -> Call:
        shape = inputs.case.shape
        lengths = inputs.visible_end.view(shape.requests, shape.rows)
        if inputs.case.op is Op.PLAN:
            return lambda: self._plan(lengths, self._places(shape.rows)[0])
        assert inputs.q_scale is not None  # refused otherwise
        weights = inputs.weights * inputs.q_scale
        if shape.kind is Kind.PREFILL:
            return self._prefill(inputs, weights)
        return self._decode(inputs, weights, lengths)

    def _places(self, rows: int) -> tuple[int, ...]:
        """Places in the schedule, the likely number first: releases differ in whether a cluster has one or two."""
        whole = self._module.get_num_sms()
        return (whole // 2, whole) if self._clusters and rows == _MULTICAST_ROWS else (whole,)

    def _plan(self, lengths: torch.Tensor, places: int) -> Any:
        return self._module.get_paged_mqa_logits_metadata(lengths, 64, places)

    def _decode(self, inputs: InputSet, weights: torch.Tensor, lengths: torch.Tensor) -> Call:
        case = inputs.case
        q = inputs.q.view(case.shape.requests, case.shape.rows, case.heads, case.head_dim)
        entries = case.layout.entries
        cache = inputs.cache.view(inputs.cache.shape[0], entries, 1, case.layout.page_bytes // entries)

        def score(plan: Any) -> Any:
            return self._paged(q, cache, weights, lengths, inputs.block_tables, plan, inputs.width)

        *others, last = self._places(case.shape.rows)
        for places in others:
            plan = self._plan(lengths, places)
            try:
                score(plan)
            except RuntimeError:
                continue
            return lambda: score(plan)
        plan = self._plan(lengths, last)
        return lambda: score(plan)

    def _prefill(self, inputs: InputSet, weights: torch.Tensor) -> Call:
        layout, end = inputs.case.layout, inputs.width
        pages = inputs.cache[inputs.block_tables[0, : ceil_div(end, layout.entries)].long()]
        keys = data_rows(pages, layout).flatten(0, 1)[:end].contiguous().view(torch.float8_e4m3fn)
        scales = scale_rows(pages, layout).flatten(0, 1)[:end].contiguous().view(torch.float32).squeeze(-1)
        start = torch.zeros_like(inputs.visible_end)
        most = (inputs.width,) if self._contiguous.wants_longest else ()
        return lambda: self._contiguous(inputs.q, (keys, scales), weights, start, inputs.visible_end, *most)


class _Scorer:
    """One of its two scorers under the name and with the arguments that the installed release has.

    Raises:
        ConfigError: the release has it under neither name.
    """

    def __init__(self, module: ModuleType, name: str) -> None:
        new, old = f"fp8_fp4_{name}", f"fp8_{name}"
        self._pair = callable(getattr(module, new, None))
        function = getattr(module, new if self._pair else old, None)
        if not callable(function):
            version = getattr(module, "__version__", "of unknown version")
            raise ConfigError(
                f"--peer deep_gemm: the installed DeepGEMM ({version}) has neither {new} nor {old}; install release 2.8"
            )
        self._function: Callable[..., Any] = function
        cleans = not self._pair or _takes(function, "clean_logits")
        self._options = {"clean_logits": False} if cleans else {}
        self.wants_longest = not cleans
        """Whether prefill must be told the greatest number of entries that a row sees."""

    def __call__(self, q: torch.Tensor, *arguments: Any) -> Any:
        return self._function((q, None) if self._pair else q, *arguments, **self._options)


def _takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function has an argument of that name; one of compiled code tells its signature in its docstring."""
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return argument in (function.__doc__ or "")

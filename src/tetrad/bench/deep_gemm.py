"""DeepGEMM's indexer as a peer: FP8 scores out of the same pages, and the schedule of its decode kernel.

Its public calls, as its README and tests describe them: ``get_paged_mqa_logits_metadata`` and ``fp8_paged_mqa_logits``
for decode, ``fp8_mqa_logits`` for prefill. Pages are laid out like ours: 64 E4M3 keys, then their 64 fp32 scales.
Queries have no scales there, so they go into the head weights: relu(c * x) = c * relu(x) for c > 0. Prefill wants keys
and scales in one piece each. Both conversions are done before the clock starts, as an engine built on it would have its
data in that form.
"""

from __future__ import annotations

import importlib
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
        ConfigError: the device is no GPU, or DeepGEMM is not installed.
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
        self._clusters = torch.cuda.get_device_capability(device)[0] == 9

    def note(self, case: Case) -> str:
        return "contiguous keys" if case.op is Op.SCORE and case.shape.kind is Kind.PREFILL else ""

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
            return self._module.fp8_paged_mqa_logits(
                q, cache, weights, lengths, inputs.block_tables, plan, inputs.width, clean_logits=False
            )

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
        return lambda: self._module.fp8_mqa_logits(
            inputs.q, (keys, scales), weights, start, inputs.visible_end, clean_logits=False
        )

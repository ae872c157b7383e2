"""The running requests on the device, a row each, at fixed addresses; and the rows of a step made from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tetrad.core.plan import NEXT, StepPlan
from tetrad.geometry import DRAFT_ROWS, blocks_for, bucket_rows
from tetrad.models.step import Rows, StepShape

_FIELDS = 5
_FROM_TABLE = -1


class RequestTable:
    """Block tables int32 [requests, blocks], lengths int64 [requests] and last tokens int64 [requests].

    A length counts the tokens whose keys are in the caches: it is the position of the request's next row. A step sends
    its rows and the changes of the block tables in one copy; block tables themselves never travel.
    """

    def __init__(self, *, requests: int, max_model_len_blocks: int, step_rows: int, device: torch.device) -> None:
        self.device = device
        self.block_table = torch.zeros((requests, max_model_len_blocks), dtype=torch.int32, device=device)
        # one more, which padding rows write to
        self.length = torch.zeros(requests + 1, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(requests + 1, dtype=torch.int64, device=device)
        rows = (_FIELDS + 1) * bucket_rows(step_rows, device.type, chunks=True)
        # all of a step's changes but those of forks, which get all blocks of their prefix at once
        changes = 2 * requests + 3 * (requests + blocks_for(step_rows))
        self._buffer = _Buffer(rows + changes, device)

    def apply(self, plan: StepPlan) -> Rows:
        """Write the plan's changes into the table and give the rows of the step.

        The tensors are views of fixed buffers or computed from them, valid until the next call.
        """
        shape = step_shape(plan, self.device.type)
        buffer = self._buffer
        changes = 3 * len(plan.blocks) + 2 * len(plan.admissions)
        host = buffer.begin(_FIELDS * shape.rows + shape.wanted + changes)
        split = _FIELDS * shape.rows
        _fill(plan, host[:split].reshape(_FIELDS, shape.rows), host[split : split + shape.wanted])
        if changes:
            _fill_changes(plan, host[split + shape.wanted :])
        sent = buffer.send()
        if changes:
            self._change(sent[split + shape.wanted :], len(plan.blocks))
        return self._rows(sent[:split].view(_FIELDS, shape.rows), sent[split : split + shape.wanted], shape)

    def _change(self, sent: Tensor, blocks: int) -> None:
        request, index, block = sent[: 3 * blocks].view(3, blocks)
        self.block_table[request.long(), index.long()] = block
        request, computed = sent[3 * blocks :].view(2, -1).long()
        self.length[request] = computed

    def _rows(self, fields: Tensor, wanted: Tensor, shape: StepShape) -> Rows:
        token, request, start, offset, count = fields
        at = request.clamp_min(0).long()
        first = torch.where(start == NEXT, self.length[at], start)
        return Rows(
            token=torch.where(token == _FROM_TABLE, self.last_token[at], token),
            request=request,
            position=first + offset,
            first=first,
            count=count,
            wanted=wanted.long(),
            block_table=self.block_table[:, : shape.width],
            shape=shape,
        )

    def advance(self, rows: Rows, accepted: Tensor | None = None) -> None:
        """Count a step's rows as computed: all of them, or of each row's request so many, int64 [R]."""
        self.length[self._at(rows.request)] = rows.first + (rows.count if accepted is None else accepted)

    def draw(self, drawn: Sequence[tuple[int, int]]) -> None:
        """Set the tokens that some requests have drawn last: (request, token)."""
        request, token = torch.tensor(drawn, dtype=torch.int64, device="cpu").to(self.device).view(-1, 2).unbind(1)
        self.last_token[request] = token

    def _at(self, request: Tensor) -> Tensor:
        """Where rows of these requests are written to: padding to one behind all others."""
        return torch.where(request < 0, len(self.block_table), request)


def step_shape(plan: StepPlan, device_type: str) -> StepShape:
    """The bucket of a step."""
    chunks = any(segment.count > 1 + DRAFT_ROWS for segment in plan.segments)
    rows = bucket_rows(plan.rows, device_type, chunks=chunks)
    wanted = min(bucket_rows(plan.wanted, device_type, chunks=False), rows) if plan.wanted else 0
    return StepShape(rows, wanted, plan.width, chunks)


def _fill(plan: StepPlan, fields: np.ndarray, wanted: np.ndarray) -> None:
    """The rows of the plan: token, request, start, offset and count [R] each, and the wanted rows [S]."""
    segments = plan.segments
    counts = np.array([segment.count for segment in segments], dtype=np.int32)
    rows = int(counts.sum())
    ends = np.cumsum(counts)
    token, request, start, offset, count = fields
    request[:rows] = np.repeat(np.array([segment.request for segment in segments], dtype=np.int32), counts)
    start[:rows] = np.repeat(np.array([segment.start for segment in segments], dtype=np.int32), counts)
    offset[:rows] = np.arange(rows) - np.repeat(ends - counts, counts)
    count[:rows] = np.repeat(counts, counts)
    token[:rows] = _FROM_TABLE
    for segment, end in zip(segments, ends.tolist(), strict=True):
        if segment.tokens:
            token[end - len(segment.tokens) : end] = segment.tokens
    for values, padding in zip(fields, (0, -1, 0, 0, 0), strict=True):
        values[rows:] = padding
    logits = np.array([segment.wanted for segment in segments], dtype=np.int32)
    total = int(logits.sum())
    wanted[:total] = np.arange(total) + np.repeat(ends - np.cumsum(logits), logits)
    wanted[total:] = -1


def _fill_changes(plan: StepPlan, host: np.ndarray) -> None:
    blocks = 3 * len(plan.blocks)
    if blocks:
        host[:blocks] = np.array(plan.blocks, dtype=np.int32).T.reshape(-1)
    admitted = [(admission.request, admission.computed) for admission in plan.admissions]
    if admitted:
        host[blocks:] = np.array(admitted, dtype=np.int32).T.reshape(-1)


class _Buffer:
    """int32 values on their way to the device: filled as a numpy array, sent in one copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self._host = torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=self._sent is not None)
        self._target = torch.zeros(size, dtype=torch.int32, device=self._device) if self._sent else self._host
        self._array = self._host.numpy()
        self._used = 0

    def begin(self, size: int) -> np.ndarray:
        """``size`` values to fill. More than ever before (forks of long prefixes) makes the buffer larger."""
        if self._sent is not None:
            self._sent.synchronize()  # the last copy may still read the host's values
        if size > len(self._array):
            self._allocate(2 * size)
        self._used = size
        return self._array[:size]

    def send(self) -> Tensor:
        """The values on the device."""
        target = self._target[: self._used]
        if self._sent is not None:
            target.copy_(self._host[: self._used], non_blocking=True)
            self._sent.record()
        return target

"""A batch as flat tensors at fixed addresses, which a captured graph could read on every replay."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tetrad.engine.batch import Batch
from tetrad.geometry import blocks_for
from tetrad.models.step import Segment, StepInputs
from tetrad.ops.row_invariant import ROW_MULTIPLE


def _padded(rows: int) -> int:
    return max(ROW_MULTIPLE, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE)


class _Buffer:
    """One tensor of the step at a fixed address: ``host`` is filled as a numpy array, ``send`` brings it over."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=pinned)
        self._device = torch.zeros(shape, dtype=dtype, device=device) if pinned else self._host
        self.host: np.ndarray = self._host.numpy()

    def send(self, *size: int) -> Tensor:
        """The first ``size`` elements along each dimension, on the device."""
        window = tuple(slice(0, extent) for extent in size)
        if self._device is not self._host:
            self._device[window].copy_(self._host[window], non_blocking=True)
        return self._device[window]


class StepStager:
    """Buffers for the largest step, on the host and on the device, allocated once."""

    def __init__(
        self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, device: torch.device
    ) -> None:
        rows, blocks = _padded(max_num_batched_tokens), blocks_for(max_model_len)
        self._ids = _Buffer((rows,), torch.int64, device)
        self._positions = _Buffer((rows,), torch.int64, device)
        self._request = _Buffer((rows,), torch.int32, device)
        self._logits_rows = _Buffer((max_num_seqs,), torch.int64, device)
        self._blocks = _Buffer((max_num_seqs, blocks), torch.int32, device)
        self._window_blocks = _Buffer((max_num_seqs, blocks), torch.int32, device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def stage(self, batch: Batch) -> StepInputs:
        """Write the batch into the buffers. The tensors returned are views of them, valid until the next call."""
        if self._sent is not None:
            self._sent.synchronize()  # the last step's copies may still read the host's buffers
        row, logits, segments, widest = 0, [], [], 1
        for request, item in enumerate(batch.scheduled):
            end = row + item.count
            sequence, holding = item.sequence, item.sequence.holding
            assert holding is not None
            self._ids.host[row:end] = sequence.tokens(item.start, item.end)
            self._positions.host[row:end] = np.arange(item.start, item.end)
            self._request.host[row:end] = request
            used = len(holding.blocks)
            widest = max(widest, used)
            self._blocks.host[request, :used] = holding.blocks
            # a window block that was given back is never read; its entry only has to be a valid number
            np.maximum(holding.window_blocks, 0, out=self._window_blocks.host[request, :used])
            segments.append(Segment(holding.state_slot, item.start, item.count))
            row = end
            if item.samples:
                logits.append(row - 1)
        rows, requests = _padded(row), len(batch.scheduled)
        self._ids.host[row:rows] = 0
        self._positions.host[row:rows] = 0
        self._request.host[row:rows] = -1
        self._logits_rows.host[: len(logits)] = logits
        inputs = StepInputs(
            rows=row,
            input_ids=self._ids.send(rows),
            positions=self._positions.send(rows),
            row_request=self._request.send(rows),
            block_tables=self._blocks.send(requests, widest),
            window_tables=self._window_blocks.send(requests, widest),
            logits_rows=self._logits_rows.send(len(logits)),
            segments=tuple(segments),
        )
        if self._sent is not None:
            self._sent.record()
        return inputs

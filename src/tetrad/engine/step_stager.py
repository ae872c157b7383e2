"""A batch as flat tensors at fixed addresses, which a captured graph could read on every replay."""

from __future__ import annotations

import torch
from torch import Tensor

from tetrad.engine.batch import Batch
from tetrad.geometry import blocks_for
from tetrad.models.step import Segment, StepInputs
from tetrad.ops.row_invariant import ROW_MULTIPLE


def _padded(rows: int) -> int:
    return max(ROW_MULTIPLE, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE)


class StepStager:
    """Buffers for the largest step, on the host and on the device, allocated once."""

    def __init__(
        self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, device: torch.device
    ) -> None:
        rows = _padded(max_num_batched_tokens)
        blocks = blocks_for(max_model_len)
        self.device = device
        pinned = device.type == "cuda"

        def pair(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
            return host, torch.zeros(shape, dtype=dtype, device=device) if pinned else host

        self._ids = pair((rows,), torch.int64)
        self._positions = pair((rows,), torch.int64)
        self._request = pair((rows,), torch.int32)
        self._logits_rows = pair((max_num_seqs,), torch.int64)
        self._blocks = pair((max_num_seqs, blocks), torch.int32)
        self._window_blocks = pair((max_num_seqs, blocks), torch.int32)

    def stage(self, batch: Batch) -> StepInputs:
        """Write the batch into the buffers. The tensors returned are views of them, valid until the next call."""
        row, logits, segments, widest = 0, [], [], 1
        for request, item in enumerate(batch.scheduled):
            end = row + item.count
            sequence, holding = item.sequence, item.sequence.holding
            assert holding is not None
            self._ids[0][row:end] = torch.tensor(sequence.tokens(item.start, item.end))
            self._positions[0][row:end] = torch.arange(item.start, item.end)
            self._request[0][row:end] = request
            used = len(holding.blocks)
            widest = max(widest, used)
            self._blocks[0][request, :used] = torch.tensor(holding.blocks, dtype=torch.int32)
            # a window block that was given back is never read; its entry only has to be a valid number
            windows = torch.tensor(holding.window_blocks, dtype=torch.int32).clamp_min(0)
            self._window_blocks[0][request, :used] = windows
            segments.append(Segment(holding.state_slot, item.start, item.count))
            row = end
            if item.samples:
                logits.append(row - 1)
        rows = _padded(row)
        self._ids[0][row:rows] = 0
        self._positions[0][row:rows] = 0
        self._request[0][row:rows] = -1
        self._logits_rows[0][: len(logits)] = torch.tensor(logits, dtype=torch.int64)
        requests = len(batch.scheduled)
        return StepInputs(
            rows=row,
            input_ids=self._send(self._ids, rows),
            positions=self._send(self._positions, rows),
            row_request=self._send(self._request, rows),
            block_tables=self._send(self._blocks, requests, widest),
            window_tables=self._send(self._window_blocks, requests, widest),
            logits_rows=self._send(self._logits_rows, len(logits)),
            segments=tuple(segments),
        )

    def _send(self, pair: tuple[Tensor, Tensor], *size: int) -> Tensor:
        host, device = pair
        window = tuple(slice(0, extent) for extent in size)
        if device is not host:
            device[window].copy_(host[window], non_blocking=True)
        return device[window]

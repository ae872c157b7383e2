"""The safetensors files of a checkpoint folder: found, opened lazily, listed from their headers."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tetrad.models.checkpoint.names import Part
from tetrad.models.checkpoint.report import Report, Trouble

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PACKED_FP4 = "F4"
"""float4_e2m1fn_x2 as safetensors spells it; its headers count codes, all else here counts the bytes of two."""


class StoredTensor(NamedTuple):
    """What a file's header says about one of its tensors."""

    file: str
    name: str
    dtype: str  # as safetensors spells it: BF16, F8_E4M3, F8_E8M0, I8, ...
    shape: tuple[int, ...]  # in elements; in bytes along the last dimension where two codes share one


class CheckpointFiles:
    """The open files of a checkpoint; a context manager.

    Opening reads headers only. What cannot be opened goes to the report, and the tensors of the other files are listed
    all the same, so that one error can name everything.
    """

    def __init__(self, folder: Path, report: Report) -> None:
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self.tensors: list[StoredTensor] = []
        index = _read_index(folder, report)
        for file in sorted(set(index.values())) if index is not None else [SINGLE_FILE]:
            self._add(folder / file, report)
        if index is not None:
            stored = {(tensor.file, tensor.name) for tensor in self.tensors}
            for name, file in index.items():
                if file in self._open and (file, name) not in stored:
                    report.add(Trouble.INDEX, f"{name} (not in {file})")

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, stored: StoredTensor, part: Part) -> Tensor:
        """The values of a stored tensor, or those of one part of a stack, on the CPU in their stored dtype."""
        handle = self._open[stored.file]
        if stored.dtype == PACKED_FP4:
            # safetensors cannot cut such a tensor; a whole one is a view of the file, so that cutting it costs nothing
            whole = handle.get_tensor(stored.name).view(torch.uint8)
            return whole if part.expert is None else whole[part.expert, part.start : part.stop]
        if part.expert is None:
            return handle.get_tensor(stored.name)
        return handle.get_slice(stored.name)[part.expert, part.start : part.stop]

    def _add(self, path: Path, report: Report) -> None:
        if not path.is_file():
            report.add(Trouble.FILE, f"{path.name} (there is no such file)")
            return
        try:
            handle = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            for name in handle.keys():  # noqa: SIM118 - not a dict
                piece = handle.get_slice(name)
                dtype, shape = piece.get_dtype(), tuple(piece.get_shape())
                if dtype == PACKED_FP4 and shape:
                    shape = (*shape[:-1], shape[-1] // 2)
                self.tensors.append(StoredTensor(path.name, name, dtype, shape))
        except (SafetensorError, OSError) as error:
            size = path.stat().st_size
            report.add(Trouble.FILE, f"{path.name} ({size} bytes, cut short or not a safetensors file: {error})")
            return
        self._open[path.name] = handle


def _read_index(folder: Path, report: Report) -> dict[str, str] | None:
    """Tensor name -> file name, or None for a checkpoint of one file.

    Where there are both, a complete index wins: the one file is then most often what an older download or a broken one
    left. An index that misses files is the older of the two, and the one file is read.
    """
    single, path = folder / SINGLE_FILE, folder / INDEX_FILE
    if not path.is_file():
        if not single.is_file():
            report.add(Trouble.FILE, _nothing_to_read(folder))
            return {}
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8-sig"))["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in weight_map.values()):
            raise ValueError("a shard is not a file name of this folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"{INDEX_FILE} (must be JSON with a weight_map of tensor name to file: {error!r})"
        if single.is_file():
            report.note(f"{SINGLE_FILE} was read, as the index beside it cannot be: {text}")
            return None
        report.add(Trouble.FILE, text)
        return {}
    shards = set(weight_map.values())
    if not single.is_file() or shards == {SINGLE_FILE}:
        return weight_map
    absent = sorted(file for file in shards if not (folder / file).is_file())
    if absent:
        report.note(
            f"{SINGLE_FILE} was read and not {INDEX_FILE} beside it, of whose files {len(absent)} of {len(shards)} "
            f"are missing ({absent[0]}, ...); if the shards are what is meant, download them again"
        )
        return None
    report.note(f"{INDEX_FILE} was read and not {SINGLE_FILE} beside it; if that is what is meant, delete the index")
    return weight_map


def _nothing_to_read(folder: Path) -> str:
    there = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))[:3]) if folder.is_dir() else ""
    what = f"the folder has {there} but neither" if there else "the folder has neither"
    if SINGLE_FILE in there.split(", "):
        return f"{SINGLE_FILE} is no file: it is a folder, or a link to a file that is missing"
    if not folder.is_dir():
        what = "there is no such folder, hence neither"
    return f"{what} {SINGLE_FILE} nor {INDEX_FILE}; random weights need --load-format dummy"

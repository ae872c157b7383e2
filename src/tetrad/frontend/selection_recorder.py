"""What the indexer chose for the tokens that were drawn: for those who study it, at no cost to those who do not."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tetrad.frontend.llm_engine import LLMEngine
from tetrad.models.config import LayerKind
from tetrad.models.step import AttentionMetadata


class SelectionRecorder:
    """While it is open, ``chosen[layer]`` is int32 [S, top-k] on the CPU, of the last step's sampled rows, in order.

    The rows are in the order of the outputs that ``LLMEngine.step`` returned, as long as every request has one choice.
    -1 fills what a row did not have.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.chosen: dict[int, Tensor] = {}
        self._engine = engine
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> SelectionRecorder:
        for layer in self._engine.config.model.layers_of(LayerKind.CSA):
            indexer = self._engine.runner.model.get_submodule(f"layers.{layer}.attn.indexer")
            self._handles.append(indexer.register_forward_hook(self._hook(layer)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, layer: int) -> Any:
        def keep(_module: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            metadata = inputs[2]
            assert isinstance(metadata, AttentionMetadata)
            self.chosen[layer] = output[metadata.inputs.logits_rows].cpu()

        return keep

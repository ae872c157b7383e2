"""What the indexer chose for the tokens that were drawn: for those who study it, at no cost to those who do not."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tetrad.errors import ConfigError, RequestError
from tetrad.frontend.llm_engine import LLMEngine
from tetrad.frontend.prompts import Prompt
from tetrad.frontend.sampling_params import SamplingParams
from tetrad.models.config import LayerKind
from tetrad.models.step import Metadata


class SelectionRecorder:
    """Records, while it is open, which compressed entries every CSA layer chose.

    >>> engine = LLMEngine(EngineArgs(model="bundled"))      # doctest: +SKIP
    >>> engine.add_request("Some text", SamplingParams(max_tokens=1))      # doctest: +SKIP
    >>> with SelectionRecorder(engine) as recorder:      # doctest: +SKIP
    ...     while engine.has_unfinished_requests:
    ...         for row, output in enumerate(engine.step()):
    ...             print(output.request_id, {layer: chosen[row] for layer, chosen in recorder.chosen.items()})

    The layers are those with an indexer, which the configuration calls CSA (compressed sparse attention). Entry ``j``
    of such a layer stands for the tokens ``4 * j`` to ``4 * j + 3``, and also pools the four before them. The query is
    the token whose successor was drawn in the step.

    ``chosen`` is layer -> int32 [S, top-k] on the CPU: the entries that the last step chose, in no promised order, -1
    where a row had fewer to choose from. ``S`` counts the sequences that drew a token in that step, in the order of the
    outputs of ``LLMEngine.step()`` (without ``finished_only``); a request of ``n`` choices has a row for each of those
    that drew one. It is empty before the first step, and its tensors have no rows after a step that drew nothing.

    Recording copies the choices to the CPU in every step and changes nothing that is computed.

    Raises:
        TypeError: the engine is no ``LLMEngine``. That of an ``LLM`` is ``llm.engine``.
    """

    def __init__(self, engine: LLMEngine) -> None:
        if not isinstance(engine, LLMEngine):
            name = type(engine).__name__
            raise TypeError(f"SelectionRecorder takes an LLMEngine, not {name}; of an LLM, give its engine: llm.engine")
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
            assert isinstance(metadata, Metadata)
            self.chosen[layer] = output[metadata.rows.wanted[metadata.rows.wanted >= 0]].cpu()

        return keep


def describe_selection(engine: LLMEngine, prompt: Prompt, max_tokens: int = 1) -> dict[str, Any]:
    """Continues a prompt greedily and tells which entries each CSA layer chose for every token that was drawn.

    Args:
        engine: one without other requests.
        prompt: text, or token ids.
        max_tokens: tokens to draw; an end token ends earlier.

    Returns:
        plain values, for JSON: ``index_cache_dtype``, ``index_topk``, ``tokens_per_entry`` (4), ``prompt_token_ids``,
        ``text`` (what was drawn, None without a tokenizer), and ``steps``, one per drawn token: ``position`` of the
        query (0 is the first token of the prompt), ``token_id`` that was drawn, ``visible`` (entries that the query
        could choose from: 0 to visible - 1) and ``layers``, the layer's number as text -> chosen entries, ascending.

    Raises:
        ConfigError: the model has no layer that chooses.
        RequestError: the prompt cannot be served.
    """
    model = engine.config.model
    if not model.layers_of(LayerKind.CSA):
        raise ConfigError("the model has no CSA layer (ratio 4 in compress_ratios), so that no entries are chosen")
    request = engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    steps: list[dict[str, Any]] = []
    text, ids = "", []
    with SelectionRecorder(engine) as recorder:
        while engine.has_unfinished_requests:
            for output in engine.step():
                if output.error is not None:
                    raise RequestError(output.error)
                assert output.request_id == request
                choice, ids = output.outputs[0], list(output.prompt_token_ids)
                text = choice.text
                position = len(ids) + len(choice.token_ids) - 2
                steps.append(
                    {
                        "position": position,
                        "token_id": choice.token_ids[-1],
                        "visible": (position + 1) // model.csa_ratio,
                        "layers": {
                            str(layer): sorted(entry for entry in chosen[0].tolist() if entry >= 0)
                            for layer, chosen in recorder.chosen.items()
                        },
                    }
                )
    return {
        "index_cache_dtype": engine.config.index_cache_dtype.dtype,
        "index_topk": model.index_topk,
        "tokens_per_entry": model.csa_ratio,
        "prompt_token_ids": ids,
        "text": None if engine.tokenizer is None else text,
        "steps": steps,
    }

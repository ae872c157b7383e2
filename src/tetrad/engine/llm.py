"""The engine for those who have their prompts at hand: give them all, get all outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from tetrad.engine.args import EngineArgs
from tetrad.engine.llm_engine import LLMEngine, Prompt
from tetrad.engine.outputs import RequestOutput
from tetrad.engine.sampling_params import SamplingParams
from tetrad.errors import RequestError


class LLM:
    """A model ready to continue prompts.

    >>> llm = LLM(model="path/to/checkpoint", index_cache_dtype="fp4")      # doctest: +SKIP
    >>> llm.generate(["Hello"], SamplingParams(max_tokens=8))[0].outputs[0].text      # doctest: +SKIP

    Takes the fields of ``EngineArgs`` as keywords.

    Raises:
        ConfigError, CheckpointError: something about the options or the checkpoint; the message says what to change.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        known = EngineArgs.__dataclass_fields__
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"LLM() does not know {', '.join(unknown)}; its options are {', '.join(sorted(known))}")
        self.engine = LLMEngine(EngineArgs(model=str(model), **options))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt; the outputs are in the order of the prompts.

        prompts: text, a list of token ids, or a list of either. sampling_params: one for all, or one per prompt.

        Raises:
            RequestError: names the prompt that cannot be served; none was started.
        """
        ids = self.engine.add_requests(self._batch(prompts), sampling_params)
        finished: dict[str, RequestOutput] = {}
        unfinished = set(ids)
        try:
            with tqdm(total=len(ids), desc="requests", disable=not use_tqdm) as bar:
                while unfinished:
                    for output in self.engine.step(finished_only=True):
                        if output.request_id in unfinished:
                            unfinished.discard(output.request_id)
                            finished[output.request_id] = output
                            bar.update()
        finally:
            # an error or an interrupt leaves no request behind; those that finished are gone already
            for request_id in unfinished:
                self.engine.abort(request_id)
        return [finished[request_id] for request_id in ids]

    @staticmethod
    def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str):
            return [prompts]
        if not isinstance(prompts, (list, tuple)):
            raise RequestError(f"prompts must be text, token ids or a list of either, not {type(prompts).__name__}")
        if prompts and not any(isinstance(prompt, (str, list, tuple)) for prompt in prompts):
            return [list(prompts)]  # type: ignore[list-item]
        return list(prompts)  # type: ignore[arg-type]

"""The engine for those who have their prompts at hand: give them all, get all outputs."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from tqdm import tqdm

from tetrad.config.args import EngineArgs
from tetrad.errors import RequestError
from tetrad.frontend.llm_engine import LLMEngine
from tetrad.frontend.outputs import RequestOutput
from tetrad.frontend.prompts import Prompt, read_prompts
from tetrad.frontend.sampling_params import SamplingParams
from tetrad.frontend.tokenizer import Tokenizer

_Options = ParamSpec("_Options")


def _with_signature_of(
    record: Callable[_Options, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Options], None]]:
    """Gives a method the parameters of ``record``, for editors, type checkers and ``help`` alike."""

    def change(method: Callable[..., None]) -> Callable[Concatenate[Any, _Options], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(record)
        parameters = [own, *signature.parameters.values()]
        method.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
        return method

    return change


def _with_suggestion(option: str) -> str:
    """An option that is not known, with the nearest that is."""
    near = difflib.get_close_matches(option, EngineArgs.__dataclass_fields__, n=1, cutoff=0.75)
    return option + (f" (did you mean {near[0]}?)" if near else "")


class LLM:
    """A model ready to continue prompts.

    >>> llm = LLM(model="path/to/checkpoint", index_cache_dtype="fp4")      # doctest: +SKIP
    >>> llm.generate(["Hello"], SamplingParams(max_tokens=8))[0].outputs[0].text      # doctest: +SKIP

    Takes the fields of ``EngineArgs``: the model first, the others as keywords. ``engine`` is the engine behind it.

    Raises:
        ConfigError, CheckpointError: something about the options or the checkpoint; the message says what to change.
    """

    @_with_signature_of(EngineArgs)
    def __init__(self, model: Any = "", **options: Any) -> None:
        known = EngineArgs.__dataclass_fields__
        unknown = sorted(set(options) - set(known))
        if unknown:
            named = ", ".join(map(_with_suggestion, unknown))
            raise TypeError(f"LLM() does not know {named}; its options are {', '.join(sorted(known))}")
        self.engine: LLMEngine = LLMEngine(EngineArgs(model, **options))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[RequestOutput]:
        """Continue every prompt; the outputs are in the order of the prompts.

        Requests that were added to ``engine`` by hand go on meanwhile. The outputs of those that end wait there for the
        next ``engine.step()``.

        Args:
            prompts: one prompt or a list of them. A prompt is text, token ids (a list, or a one-dimensional array or
                tensor), ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. A list that holds no prompt is one, of
                token ids.
            sampling_params: one for all, or one per prompt; None takes those of ``get_default_sampling_params``.
            use_tqdm: shows a bar that counts the requests that are done; a class like ``tqdm`` makes that bar.

        Raises:
            RequestError: names the prompt that cannot be served, and none was started; or another caller of the
                engine has taken an output.
            DeviceLostError: an earlier step lost the device; the engine must be built anew.
        """
        if not (isinstance(use_tqdm, bool) or callable(use_tqdm)):
            raise RequestError(f"use_tqdm must be true, false or a class like tqdm, not {type(use_tqdm).__name__}")
        # a bar of tqdm's own cannot be drawn where standard error is closed
        quiet = not use_tqdm or (use_tqdm is True and sys.stderr is None)
        make_bar = tqdm if isinstance(use_tqdm, bool) else use_tqdm
        finished: dict[str, RequestOutput] = {}
        before = self.engine.request_ids
        try:
            ids = self.engine.add_requests(read_prompts(prompts), sampling_params)
            unfinished = set(ids)
            with make_bar(total=len(ids), desc="requests", disable=quiet) as bar:
                while unfinished:
                    for output in self.engine.step(finished_only=True, only=unfinished):
                        unfinished.discard(output.request_id)
                        finished[output.request_id] = output
                        bar.update()
                    if unfinished and not self.engine.has_unfinished_requests:
                        raise RequestError(
                            f"another caller of step() or abort() has taken the output of {min(unfinished)}; "
                            f"give step() the ids of your own requests with only="
                        )
            return [finished[request_id] for request_id in ids]
        except BaseException:
            # an error or an interrupt leaves no request behind, and no output
            for request_id in self.engine.request_ids - before:
                self.engine.abort(request_id)
            raise

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: the model folder has none.
        """
        return self.engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` takes where it is given none: the defaults of the model's generation_config.json.

        ``dataclasses.replace`` makes others of them.
        """
        return dataclasses.replace(self.engine.default_sampling_params)

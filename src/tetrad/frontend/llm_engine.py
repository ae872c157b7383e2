"""Requests in, outputs out: the front end over a core and a runner in the same process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeVar

from tetrad.config.args import EngineArgs
from tetrad.config.engine_config import EngineConfig
from tetrad.core.engine_core import ATTEMPTS, EngineCore
from tetrad.core.messages import Abort, Add, AddSequence, Tokens
from tetrad.errors import ConfigError, RequestError
from tetrad.frontend.detokenizer import Detokenizer
from tetrad.frontend.generation_config import GenerationConfig
from tetrad.frontend.outputs import RequestOutput
from tetrad.frontend.prompts import Prompt, read_prompt
from tetrad.frontend.request import Choice, Request
from tetrad.frontend.sampling_params import SamplingParams, resolve_seed
from tetrad.frontend.tokenizer import Tokenizer, require_tokenizer
from tetrad.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


def _in_turn(method: F) -> F:
    """Calls from several threads wait for one another; a call may make another."""

    @functools.wraps(method)
    def locked(self: LLMEngine, *args: Any, **options: Any) -> Any:
        with self._turn:
            return method(self, *args, **options)

    return locked  # type: ignore[return-value]


class LLMEngine:
    """Serves many requests at once. Calls from several threads take turns; a step runs for the requests of all.

    ``add_request`` checks everything that a request can get wrong, so that ``step`` never fails because of one. What
    goes in is copied and what comes out is a copy: nothing that the caller does to either changes a running request.

    Attributes:
        default_sampling_params: for requests that come without: those of ``SamplingParams()``, changed by the model's
            generation_config.json.
    """

    def __init__(self, args: EngineArgs | EngineConfig, *, progress: bool = False) -> None:
        self.config: EngineConfig = args if isinstance(args, EngineConfig) else EngineConfig.resolve(args)
        config = self.config
        self.tokenizer: Tokenizer | None = Tokenizer.load(config.tokenizer_path, config.model.vocab_size)
        if config.names_tokenizer and self.tokenizer is None:
            raise ConfigError(f"tokenizer {config.tokenizer_path!r} is not a folder with a tokenizer.json; correct it")
        self.eos_token_ids: frozenset[int] = frozenset(config.model.eos_token_id) | frozenset(
            self.tokenizer.eos_token_ids if self.tokenizer else ()
        )
        generation = GenerationConfig.load(config.model_path, config.generation_config)
        generation.check_vocabulary(config.model.vocab_size)
        if news := generation.news(self.eos_token_ids):
            logger.warning("%s", news)
        self.eos_token_ids |= frozenset(generation.eos_token_ids)
        self.default_sampling_params: SamplingParams = generation.sampling_params
        self.runner = ModelRunner(config, progress=progress)
        self.core = EngineCore.build(
            self.runner,
            blocks=self.runner.sizes.blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunked_prefill=config.chunked_prefill,
        )
        self._turn = threading.RLock()
        self.requests: dict[str, Request] = {}
        self._choices: dict[int, Choice] = {}
        self._kept: dict[str, RequestOutput] = {}
        self._unsettled = False
        self._counter = itertools.count()
        self._numbers = itertools.count()
        # as text, because a number would count by its absolute value
        self._seeds = random.Random(str(config.seed)) if config.seed is not None else None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do, or an output to give that nobody has seen yet."""
        return bool(self.requests) or bool(self._kept)

    @property
    def request_ids(self) -> frozenset[str]:
        """The ids in use: of unfinished requests, and of those whose last output ``step`` has not given yet."""
        return frozenset(self.requests) | frozenset(self._kept)

    @property
    def computed_tokens(self) -> int:
        """Tokens of all steps so far, for who shows progress; those of a preempted sequence count again."""
        return self.core.computed_rows

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: the model folder has none.
        """
        if self.tokenizer is None:
            raise ConfigError(f"{self.config.model_path} has no tokenizer.json; add the file, or name a tokenizer")
        return self.tokenizer

    @_in_turn
    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a prompt. Returns the request's id.

        The ``n`` choices of a request compute its prompt once.

        Args:
            prompt: in any of the forms of ``tetrad.frontend.prompts``: text, token ids (a list, or a one-dimensional
                array or tensor), ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            params: None takes ``default_sampling_params``.
            request_id: a name that no request has of which ``step`` may still give an output; None makes one.

        Raises:
            RequestError: the request cannot be served; it says why. Nothing was queued, other requests go on, and
                later requests draw what they would have drawn.
            DeviceLostError: an earlier step lost the device; the engine must be built anew.
        """
        self._settle()
        self.core.require_device()
        if request_id is not None:
            self._check_name(request_id)
        request = self._request(prompt, self.default_sampling_params if params is None else params)
        return self._queue([request], request_id)[0]

    @_in_turn
    def add_requests(
        self, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None = None
    ) -> list[str]:
        """Queue several prompts at once. What all of them begin with (64 tokens or more) is computed once.

        params: one for all, or one per prompt; None takes ``default_sampling_params``. Returns the requests' ids, in
        order.

        Raises:
            RequestError: names the prompt that cannot be served; none was queued.
            DeviceLostError: an earlier step lost the device; the engine must be built anew.
        """
        self._settle()
        self.core.require_device()
        if not isinstance(prompts, SequenceOf) or isinstance(prompts, (str, bytes)):
            raise RequestError(f"prompts must be a list, not {type(prompts).__name__}")
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_sampling_params] * len(prompts)
        if not isinstance(params, SequenceOf) or isinstance(params, (str, bytes)):
            raise RequestError(f"params must be SamplingParams or a list of them, not {type(params).__name__}")
        if len(params) != len(prompts):
            raise RequestError(
                f"there are {len(prompts)} prompts but {len(params)} sampling_params; give one for all or one each"
            )
        requests = []
        for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self._request(prompt, one))
            except RequestError as error:
                raise RequestError(f"prompt {place}: {error}") from error
        return self._queue(requests)

    def _check_name(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            what = "a request's id is a string, and stands behind its prompt and its parameters"
            raise RequestError(f"request_id must be a string, not {type(request_id).__name__}: {what}")
        if request_id in self.requests:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request; choose another")
        if request_id in self._kept:
            raise RequestError(
                f"request_id {request_id!r} is in use by a request whose output step() has not given yet; "
                f"choose another"
            )

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A checked request without a name. Nothing of the engine changes until all that come together are checked."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        text, ids = self._read(prompt)
        params = dataclasses.replace(params)  # the caller may have changed its logit_bias, and may do so again
        params.check_vocabulary(self.config.model.vocab_size)
        if params.stop:
            require_tokenizer(self.tokenizer, "stop strings")
        return Request("", text, ids, params, time.monotonic())

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        limit = self.config.max_model_len
        text, ids = read_prompt(prompt, self.config.model.vocab_size)
        if ids is None:
            ids = require_tokenizer(self.tokenizer, "text prompts").encode(text or "")
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        if len(ids) >= limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains {len(ids)} "
                f"input tokens, which leaves no room for output; shorten the prompt"
            )
        return text, ids

    def _queue(self, requests: list[Request], request_id: str | None = None) -> list[str]:
        try:
            sequences = []
            for request in requests:
                request.request_id = self._new_name() if request_id is None else request_id
                self.requests[request.request_id] = request
                sequences += self._sequences(request)
            shared = _common_prefix([request.prompt_token_ids for request in requests]) if len(sequences) > 1 else 0
            self.core.add(Add(tuple(sequences), shared))
        except BaseException:
            # an interrupt too: all of them are queued, or none
            for request in requests:
                if self.requests.get(request.request_id) is request:
                    self.abort(request.request_id)
            raise
        return [request.request_id for request in requests]

    def _new_name(self) -> str:
        return next(
            name for i in self._counter if (name := f"request-{i}") not in self.requests and name not in self._kept
        )

    def _sequences(self, request: Request) -> list[AddSequence]:
        ids, params = request.prompt_token_ids, request.params
        room = self.config.max_model_len - len(ids)
        sequences = []
        for index in range(params.n):
            choice = Choice(request, index, next(self._numbers), self._detokenizer(request))
            request.choices.append(choice)
            self._choices[choice.number] = choice
            sequences.append(request.add_sequence(choice, self._seed(params, index), self.eos_token_ids, room))
        return sequences

    def _seed(self, params: SamplingParams, index: int) -> int:
        if params.seed is None and self._seeds is not None:
            return self._seeds.getrandbits(64)
        return resolve_seed(params, index)

    @_in_turn
    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request and free what it holds. Returns its output so far, None if it is not here.

        Raises:
            RequestError: ``request_id`` is no string.
        """
        self._settle()
        if not isinstance(request_id, str):
            raise RequestError(f"abort takes the id of one request, not {type(request_id).__name__}; call it for each")
        request = self.requests.get(request_id)
        if request is None:
            return self._kept.pop(request_id, None)
        self._unsettled = True
        running = [choice for choice in request.choices if choice.finish_reason is None]
        self._take(self.core.abort(Abort(tuple(choice.number for choice in running))))
        for choice in running:
            if choice.finish_reason is None:
                choice.finish("abort")
        self._end(request)
        self._unsettled = False
        return self._kept.pop(request_id)

    @_in_turn
    def step(self, *, finished_only: bool = False, only: Collection[str] | None = None) -> list[RequestOutput]:
        """Run one step. Returns the output of every request that got a token (or ended) in it.

        An exception inside a step ends no request: what ran is computed anew, with the same tokens. Only a request that
        was in two such steps, and got no further between them, ends with an error. After an interrupt the next call
        goes on where this one was left.

        Args:
            finished_only: leave out requests that go on. An output is a copy of all tokens so far, so those of long
                requests cost more the longer they are: who has no use for them sets this.
            only: the ids of the requests whose outputs are wanted. Last outputs of others that end are kept for the
                next step that wants them, so no caller loses what another one's step has brought to its end. Who gives
                ``only`` asks whether its own requests are done, not for ``has_unfinished_requests``.
        """
        if isinstance(only, str):
            only = (only,)  # not its parts
        self._settle()
        self._unsettled = True
        touched = self._take(self.core.step())
        self._unsettled = False
        outputs = [
            self._kept.get(request.request_id) or request.output()
            for request in touched
            if request.finished or not (finished_only or (only is not None and request.request_id not in only))
        ]
        return self._deliver(outputs, only)

    def _take(self, messages: SequenceOf[Tokens], *, again: bool = False) -> list[Request]:
        """Give the choices their tokens, ``again`` after an interrupt. The requests that got any, or ended."""
        now = time.monotonic()
        touched: dict[str, Request] = {}
        for tokens in messages:
            choice = self._choices.get(tokens.number)
            # it may have ended here before the core knew, or an interrupt may have come before its end was noted
            if choice is None or (choice.finish_reason is not None and not again):
                continue
            request = choice.request
            touched[request.request_id] = request
            request.note(tokens, now)
            self._take_choice(choice, tokens, again)
            if choice.finish_reason is not None and tokens.finish_reason is None:
                self.core.abort(Abort((choice.number,)))  # a stop string, of which the core knows nothing
        for request in touched.values():
            if request.finished:
                self._end(request)
        return list(touched.values())

    def _take_choice(self, choice: Choice, tokens: Tokens, again: bool) -> None:
        """One message, whatever part of it the choice has. What an exception ends is done again, once."""
        for attempt in range(ATTEMPTS):
            try:
                if again or attempt or tokens.start != len(choice.token_ids):
                    choice.rewind(tokens.start, self._detokenizer(choice.request))
                choice.take(tokens, self._decode_token)
                return
            except Exception as error:
                if attempt == ATTEMPTS - 1:
                    choice.fail(f"its text could not be made: {type(error).__name__}: {error}")

    def _settle(self) -> None:
        """An interrupt has left a call in the middle: do what is left of it."""
        if not self._unsettled:
            return
        self._choices = {
            number: choice
            for number, choice in self._choices.items()
            if self.requests.get(choice.request.request_id) is choice.request
        }
        self._take(self.core.handed_over, again=True)
        known = self.core.numbers()
        for choice in list(self._choices.values()):
            if choice.finish_reason is None and choice.number not in known:
                choice.finish("abort")  # the core has aborted it already
        for request in list(self.requests.values()):
            if request.finished:
                self._end(request)
        self._unsettled = False

    def _end(self, request: Request) -> None:
        """Keep the last output and forget the request, in an order that an interrupt may break anywhere."""
        request.ended = time.monotonic() if request.ended is None else request.ended
        self._kept[request.request_id] = request.output()
        self.requests.pop(request.request_id, None)
        for choice in request.choices:
            self._choices.pop(choice.number, None)

    def _detokenizer(self, request: Request) -> Detokenizer:
        params = request.params
        return Detokenizer(self.tokenizer, request.prompt_token_ids, params.stop_strings, params.min_tokens)

    def _decode_token(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode_token(token_id)

    def _deliver(self, outputs: list[RequestOutput], only: Collection[str] | None) -> list[RequestOutput]:
        """The outputs of this step that are wanted, then those kept from earlier ones; the rest is kept."""
        new = {output.request_id for output in outputs}
        outputs = [*outputs, *(output for output in self._kept.values() if output.request_id not in new)]
        if only is None:
            self._kept = {}
            return outputs
        outputs = [output for output in outputs if output.request_id in only]
        self._kept = {name: output for name, output in self._kept.items() if name not in only}
        return outputs


def _common_prefix(prompts: list[list[int]]) -> int:
    """Tokens that all prompts begin with, fewer than any has: every sequence goes on from a token of its own."""
    first, last = min(prompts), max(prompts)
    limit = min(len(prompt) for prompt in prompts) - 1
    return next((place for place in range(limit) if first[place] != last[place]), limit)

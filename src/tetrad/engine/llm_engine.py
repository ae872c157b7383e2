"""Requests in, tokens out: the loop that schedules, runs and samples one step at a time."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from tetrad.cache.block_manager import BlockManager
from tetrad.engine.args import EngineArgs
from tetrad.engine.batch import Batch
from tetrad.engine.config import EngineConfig
from tetrad.engine.detokenizer import Detokenizer
from tetrad.engine.generation_config import GenerationConfig
from tetrad.engine.model_runner import ModelRunner
from tetrad.engine.outputs import RequestOutput
from tetrad.engine.prompts import Prompt, read_prompt
from tetrad.engine.sampler import SampledToken, Sampler, SamplingRow
from tetrad.engine.sampling_params import SamplingParams, resolve_seed
from tetrad.engine.scheduler import Scheduler
from tetrad.engine.sequence import Request, Sequence, SequenceStatus
from tetrad.engine.tokenizer import Tokenizer, require_tokenizer
from tetrad.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

SHARED_PREFIX_TOKENS = 64
"""A common beginning shorter than this is computed by every sequence for itself."""


class LLMEngine:
    """Serves many requests at once. Not thread-safe: one caller adds, steps and aborts.

    ``add_request`` checks everything that a request can get wrong, so that ``step`` never fails because of one. What
    goes in is copied and what comes out is a copy: nothing that the caller does to either changes a running request.

    Attributes:
        default_sampling_params: for requests that come without: those of ``SamplingParams()``, changed by the model's
            generation_config.json.
    """

    def __init__(self, args: EngineArgs | EngineConfig, *, progress: bool = False) -> None:
        self.config: EngineConfig = args if isinstance(args, EngineConfig) else EngineConfig.resolve(args)
        config = self.config
        self.tokenizer: Tokenizer | None = Tokenizer.load(
            config.args.tokenizer or config.args.model, config.model.vocab_size
        )
        if config.args.tokenizer and self.tokenizer is None:
            raise ConfigError(
                f"tokenizer {str(config.args.tokenizer)!r} is not a folder with a tokenizer.json; correct it"
            )
        self.eos_token_ids: frozenset[int] = frozenset(config.model.eos_token_id) | frozenset(
            self.tokenizer.eos_token_ids if self.tokenizer else ()
        )
        generation = GenerationConfig.load(config.args)
        generation.check_vocabulary(config.model.vocab_size)
        if news := generation.news(self.eos_token_ids):
            logger.warning("%s", news)
        self.eos_token_ids |= frozenset(generation.eos_token_ids)
        self.default_sampling_params: SamplingParams = generation.sampling_params
        self.runner = ModelRunner(config, progress=progress)
        self.manager = BlockManager(self.runner.sizes, config.model.sliding_window)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunked_prefill=config.args.enable_chunked_prefill,
        )
        self.sampler = Sampler(config.model.vocab_size, sorted(self.eos_token_ids), self.tokenizer)
        self.requests: dict[str, Request] = {}
        self._kept: dict[str, RequestOutput] = {}
        # tokens of all steps so far, for who shows progress; those of a preempted sequence count again
        self.computed_tokens = 0
        self._counter = itertools.count()
        # as text, because a number would count by its absolute value
        self._seeds = random.Random(str(config.args.seed)) if config.args.seed is not None else None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do, or an output to give that nobody has seen yet."""
        return self.scheduler.has_work or bool(self._kept)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: the model folder has none.
        """
        if self.tokenizer is None:
            raise ConfigError(f"{self.config.args.model} has no tokenizer.json; add the file, or name a tokenizer")
        return self.tokenizer

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a prompt. Returns the request's id.

        The ``n`` choices of a request compute its prompt once.

        Args:
            prompt: in any of the forms of ``tetrad.engine.prompts``: text, token ids (a list, or a one-dimensional
                array or tensor), ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            params: None takes ``default_sampling_params``.
            request_id: a name that no request has of which ``step`` may still give an output; None makes one.

        Raises:
            RequestError: the request cannot be served; it says why. Nothing was queued, other requests go on, and
                later requests draw what they would have drawn.
        """
        if request_id is not None:
            self._check_name(request_id)
        request = self._request(prompt, self.default_sampling_params if params is None else params)
        return self._queue([request], request_id)[0]

    def add_requests(
        self, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None = None
    ) -> list[str]:
        """Queue several prompts at once. What all of them begin with (64 tokens or more) is computed once.

        params: one for all, or one per prompt; None takes ``default_sampling_params``. Returns the requests' ids, in
        order.

        Raises:
            RequestError: names the prompt that cannot be served; none was queued.
        """
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
            raise RequestError(f"request_id must be a string, not {request_id!r}")
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
        for request in requests:
            request.request_id = self._new_name() if request_id is None else request_id
            self.requests[request.request_id] = request
            self._add_sequences(request)
        sequences = [sequence for request in requests for sequence in request.sequences]
        prefix = _common_prefix([request.prompt_token_ids for request in requests]) if len(sequences) > 1 else []
        if len(prefix) >= SHARED_PREFIX_TOKENS and self.config.max_num_seqs > 1:
            stem = _stem(prefix)
            stem.branches = len(sequences)
            for sequence in sequences:
                sequence.stem, sequence.request.common = stem, stem.request
            self.scheduler.add([stem])
        self.scheduler.add(sequences)
        return [request.request_id for request in requests]

    def _new_name(self) -> str:
        return next(
            name for i in self._counter if (name := f"request-{i}") not in self.requests and name not in self._kept
        )

    def _add_sequences(self, request: Request) -> None:
        ids, params = request.prompt_token_ids, request.params
        limit = params.token_limit(self.config.max_model_len - len(ids))
        for index in range(params.n):
            detokenizer = Detokenizer(self.tokenizer, ids, params.stop_strings, params.min_tokens)
            tokens: list[int] = []  # one list, which the engine extends and the sampler reads
            row = SamplingRow(params, ids, tokens, self._seed(params, index))
            request.sequences.append(Sequence(request, index, tokens, row, limit, detokenizer))

    def _seed(self, params: SamplingParams, index: int) -> int:
        if params.seed is None and self._seeds is not None:
            return self._seeds.getrandbits(64)
        return resolve_seed(params, index)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request and give back what it holds. Returns its output so far, None if it is not here."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return self._kept.pop(request_id, None)
        for sequence in request.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                self.scheduler.leave(sequence)
                sequence.finish("abort")
        request.ended = time.monotonic()
        return request.output()

    def step(self, *, finished_only: bool = False, only: Collection[str] | None = None) -> list[RequestOutput]:
        """Run one step. Returns the output of every request that got a token (or ended) in it.

        Args:
            finished_only: leave out requests that go on. An output is a copy of all tokens so far, so those of long
                requests cost more the longer they are: who has no use for them sets this.
            only: the ids of the requests whose outputs are wanted. Last outputs of others that end are kept for the
                next step that wants them, so no caller loses what another one's step has brought to its end. Who gives
                ``only`` asks whether its own requests are done, not for ``has_unfinished_requests``.
        """
        if isinstance(only, str):
            only = (only,)  # not its parts
        batch = self.scheduler.schedule()
        if not batch.scheduled:
            return self._deliver([], only)
        _note_start(batch)
        logits = self.runner.execute(batch)
        self.scheduler.advance(batch)
        self.computed_tokens += sum(item.count for item in batch.scheduled)
        sampling = [item.sequence for item in batch.scheduled if item.samples]
        tokens = self.sampler.sample(logits, [sequence.sampling_row for sequence in sampling])
        touched = self._commit(sampling, tokens)
        wanted = [
            request
            for request in touched
            if request.finished or not (finished_only or (only is not None and request.request_id not in only))
        ]
        return self._deliver([request.output() for request in wanted], only)

    def _deliver(self, outputs: list[RequestOutput], only: Collection[str] | None) -> list[RequestOutput]:
        """The outputs of this step that are wanted, then those kept from earlier ones; the rest is kept."""
        outputs = [*outputs, *self._kept.values()]
        if only is None:
            self._kept.clear()
            return outputs
        self._kept = {output.request_id: output for output in outputs if output.request_id not in only}
        return [output for output in outputs if output.request_id in only]

    def _commit(self, sequences: list[Sequence], tokens: list[SampledToken]) -> list[Request]:
        now = time.monotonic()
        touched: dict[str, Request] = {}
        for sequence, token in zip(sequences, tokens, strict=True):
            request = sequence.request
            touched[request.request_id] = request
            if token.error is not None:
                request.error = token.error
                sequence.finish("error")
            else:
                if request.first_token is None:
                    request.first_token = now
                request.last_token = now
                self._append(sequence, token)
            if sequence.status is SequenceStatus.FINISHED:
                self.scheduler.leave(sequence)
        for request in touched.values():
            if request.finished:
                request.ended = now
                del self.requests[request.request_id]
        return list(touched.values())

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        params, token_id = sequence.request.params, token.token_id
        sequence.append(token_id, token.logprobs)
        count = len(sequence.output_token_ids)
        may_stop = count > params.min_tokens
        # a token that ends the output is one of its ids, but never part of its text
        if may_stop and token_id in params.stop_ids:
            sequence.finish("stop", token_id)
            return
        if may_stop and not params.ignore_eos and token_id in self.eos_token_ids:
            sequence.finish("stop")
            return
        sequence.detokenizer.append(token_id)
        if sequence.detokenizer.stop_string is not None:
            sequence.finish("stop", sequence.detokenizer.stop_string)
        elif count >= sequence.max_tokens:
            sequence.finish("length")


def _note_start(batch: Batch) -> None:
    """Note when the first of a request's tokens is computed."""
    now = time.monotonic()
    for item in batch.scheduled:
        if item.sequence.request.started is None:
            item.sequence.request.started = now


def _common_prefix(prompts: list[list[int]]) -> list[int]:
    """What all prompts begin with, less than the whole of any: every sequence goes on from a token of its own."""
    first, last = min(prompts), max(prompts)
    limit = min(len(prompt) for prompt in prompts) - 1
    length = next((place for place in range(limit) if first[place] != last[place]), limit)
    return first[:length]


def _stem(prefix: list[int]) -> Sequence:
    """A sequence that computes a common prefix and draws no token."""
    params = SamplingParams(max_tokens=1)
    request = Request("", None, prefix, params, time.monotonic())
    tokens: list[int] = []
    return Sequence(request, 0, tokens, SamplingRow(params, prefix, tokens, 0), 0, Detokenizer(None), is_stem=True)

"""Requests in, tokens out: the loop that schedules, runs and samples one step at a time."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence as SequenceOf
from numbers import Integral

from tetrad.cache.block_manager import BlockManager
from tetrad.engine.args import EngineArgs
from tetrad.engine.config import EngineConfig
from tetrad.engine.detokenizer import Detokenizer
from tetrad.engine.model_runner import ModelRunner
from tetrad.engine.outputs import RequestOutput
from tetrad.engine.sampler import SampledToken, Sampler, SamplingRow
from tetrad.engine.sampling_params import SamplingParams, resolve_seed
from tetrad.engine.scheduler import Scheduler
from tetrad.engine.sequence import Request, Sequence, SequenceStatus
from tetrad.engine.tokenizer import Tokenizer, require_tokenizer
from tetrad.errors import ConfigError, RequestError

Prompt = str | SequenceOf[int]

SHARED_PREFIX_TOKENS = 64
"""A common beginning shorter than this is computed by every sequence for itself."""


class LLMEngine:
    """Serves many requests at once. Not thread-safe: one caller adds, steps and aborts.

    ``add_request`` checks everything that a request can get wrong, so that ``step`` never fails because of one.
    """

    def __init__(self, args: EngineArgs | EngineConfig, *, progress: bool = False) -> None:
        self.config = args if isinstance(args, EngineConfig) else EngineConfig.resolve(args)
        config = self.config
        self.tokenizer = Tokenizer.load(config.args.tokenizer or config.args.model, config.model.vocab_size)
        if config.args.tokenizer and self.tokenizer is None:
            raise ConfigError(
                f"tokenizer {str(config.args.tokenizer)!r} is not a folder with a tokenizer.json; correct it"
            )
        self.eos_token_ids = frozenset(config.model.eos_token_id) | frozenset(
            self.tokenizer.eos_token_ids if self.tokenizer else ()
        )
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
        # tokens of all steps so far, for who shows progress; those of a preempted sequence count again
        self.computed_tokens = 0
        self._counter = itertools.count()
        self._seeds = random.Random(config.args.seed) if config.args.seed is not None else None

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self.scheduler.has_work

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a prompt (text, or token ids). Returns the request's id.

        The ``n`` choices of a request compute its prompt once.

        Raises:
            RequestError: the request cannot be served; it says why. Nothing was queued, other requests go on.
        """
        request = self._request(prompt, SamplingParams() if params is None else params, request_id)
        self._queue([request])
        return request.request_id

    def add_requests(
        self, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None = None
    ) -> list[str]:
        """Queue several prompts at once. What all of them begin with (64 tokens or more) is computed once.

        params: one for all, or one per prompt. Returns the requests' ids, in order.

        Raises:
            RequestError: names the prompt that cannot be served; none was queued.
        """
        if not isinstance(prompts, (list, tuple)):
            raise RequestError(f"prompts must be a list, not {type(prompts).__name__}")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, (list, tuple)):
            raise RequestError(f"params must be SamplingParams or a list of them, not {type(params).__name__}")
        if len(params) != len(prompts):
            raise RequestError(
                f"there are {len(prompts)} prompts but {len(params)} sampling_params; give one for all or one each"
            )
        requests = []
        for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self._request(prompt, one, None))
            except RequestError as error:
                raise RequestError(f"prompt {place}: {error}") from error
        self._queue(requests)
        return [request.request_id for request in requests]

    def _request(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> Request:
        """A checked request that is not queued yet."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        if request_id is None:
            request_id = next(name for i in self._counter if (name := f"request-{i}") not in self.requests)
        elif not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, not {request_id!r}")
        elif request_id in self.requests:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request; choose another")
        text, ids = self._prompt(prompt)
        params.check_vocabulary(self.config.model.vocab_size)
        request = Request(request_id, text, ids, params, time.monotonic())
        room = self.config.max_model_len - len(ids)
        for index in range(params.n):
            detokenizer = Detokenizer(self.tokenizer, ids, params.stop, params.min_tokens)
            tokens: list[int] = []  # one list, which the engine extends and the sampler reads
            row = SamplingRow(params, ids, tokens, self._seed(params, index))
            request.sequences.append(Sequence(request, index, tokens, row, params.token_limit(room), detokenizer))
        return request

    def _queue(self, requests: list[Request]) -> None:
        sequences = [sequence for request in requests for sequence in request.sequences]
        self.requests.update({request.request_id: request for request in requests})
        prefix = _common_prefix([request.prompt_token_ids for request in requests]) if len(sequences) > 1 else []
        if len(prefix) >= SHARED_PREFIX_TOKENS and self.config.max_num_seqs > 1:
            stem = _stem(prefix)
            stem.branches = len(sequences)
            for sequence in sequences:
                sequence.stem = stem
            self.scheduler.add([stem])
        self.scheduler.add(sequences)

    def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        limit, vocabulary = self.config.max_model_len, self.config.model.vocab_size
        if isinstance(prompt, str):
            text, ids = prompt, require_tokenizer(self.tokenizer, "text prompts").encode(prompt)
        elif isinstance(prompt, (list, tuple)):
            text, ids = None, list(prompt)
            for place, token in enumerate(ids):
                if not isinstance(token, Integral) or isinstance(token, bool):
                    raise RequestError(f"the prompt's item {place} is {token!r}; give text or a list of token ids")
                if not 0 <= token < vocabulary:
                    raise RequestError(f"the prompt's token id {token} is out of range: ids are 0 to {vocabulary - 1}")
            ids = [int(token) for token in ids]
        else:
            raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        if len(ids) >= limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains {len(ids)} "
                f"input tokens, which leaves no room for output; shorten the prompt"
            )
        return text, ids

    def _seed(self, params: SamplingParams, index: int) -> int:
        if params.seed is None and self._seeds is not None:
            return self._seeds.getrandbits(64)
        return resolve_seed(params, index)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request and give back what it holds. Returns its output so far, None if it is not here."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        for sequence in request.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                self.scheduler.leave(sequence)
                sequence.finish("abort")
        return request.output()

    def step(self, *, finished_only: bool = False) -> list[RequestOutput]:
        """Run one step. Returns the output of every request that got a token (or ended) in it.

        An output holds all tokens so far, so those of long requests cost more the longer they are: who has no use for
        them asks for ``finished_only``.
        """
        batch = self.scheduler.schedule()
        if not batch.scheduled:
            return []
        logits = self.runner.execute(batch)
        self.scheduler.advance(batch)
        self.computed_tokens += sum(item.count for item in batch.scheduled)
        sampling = [item.sequence for item in batch.scheduled if item.samples]
        tokens = self.sampler.sample(logits, [sequence.sampling_row for sequence in sampling])
        touched = self._commit(sampling, tokens)
        return [request.output() for request in touched if request.finished or not finished_only]

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
                request.first_token = request.first_token or now
                request.last_token = now
                self._append(sequence, token)
            if sequence.status is SequenceStatus.FINISHED:
                self.scheduler.leave(sequence)
        for request in touched.values():
            if request.finished:
                del self.requests[request.request_id]
        return list(touched.values())

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        params, token_id = sequence.request.params, token.token_id
        sequence.output_token_ids.append(token_id)
        if token.logprobs is not None:
            sequence.logprobs.append(token.logprobs)
        count = len(sequence.output_token_ids)
        may_stop = count > params.min_tokens
        # a token that ends the output is one of its ids, but never part of its text
        if may_stop and token_id in params.stop_token_ids:
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

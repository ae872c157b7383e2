"""From logits to the next token of every request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tetrad.core.messages import Sampling, TokenLogprobs
from tetrad.runner.token_counts import TokenCounts

# Rows are worked on by about this many logits at a time, to bound the memory of the fp64 copies (16 MiB each).
_CHUNK_LOGITS = 1 << 21
# top_p looks among this many likeliest tokens before it sorts the vocabulary.
_NUCLEUS_GUESS = 1024


@dataclass(slots=True)
class SamplingRow:
    """One row of logits: whose it is, and what came before.

    Keep one object for a request while it lives, with the request's own lists: for the penalties it counts only the ids
    that came since the last token, so that a long output costs no more per token than a short one.

    Attributes:
        params: checked numbers; their token ids are within the vocabulary.
        prompt_token_ids: the prompt.
        output_token_ids: what was generated before this row.
        seed: the key of the request's random stream: 0 <= seed < 2**128.
        output_index: number of the token to be drawn, from 0; None means ``len(output_token_ids)``.
    """

    params: Sampling
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seed: int
    output_index: int | None = None
    _seen: TokenCounts | None = field(default=None, init=False, repr=False, compare=False)
    _output: TokenCounts | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def index(self) -> int:
        """Number of the token to be drawn."""
        return len(self.output_token_ids) if self.output_index is None else self.output_index

    @property
    def must_go_on(self) -> bool:
        """Whether ``min_tokens`` forbids the output to end with this token."""
        return self.index < self.params.min_tokens

    @property
    def is_adjusted(self) -> bool:
        """Whether some logit of the row is changed before the choice."""
        params = self.params
        return (
            self.must_go_on
            or bool(params.logit_bias)
            or params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    def seen_ids(self) -> np.ndarray:
        """The distinct ids of prompt and output, int64; valid until the next call."""
        if self._seen is None:
            self._seen = TokenCounts(np.unique(np.asarray(self.prompt_token_ids, dtype=np.int64)).tolist())
        return self._seen.of(self.output_token_ids)[0]

    def output_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids of the output and how often each occurs, int64; valid until the next call."""
        if self._output is None:
            self._output = TokenCounts()
        return self._output.of(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What a row of logits gave.

    Attributes:
        token_id: the token, -1 where there is an error.
        logprobs: None unless asked for.
        error: why no token could be chosen, for the request to end with; other rows are not touched by it.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    """Chooses the next token of every row, each as if it were alone.

    In this order, with "likelier" meaning the larger logit and, of equals, the lower id:

    1. ``repetition_penalty`` on the ids of prompt and output: a positive logit is divided by it, any other multiplied.
    2. ``frequency_penalty`` times the occurrences in the output, and ``presence_penalty`` once, are subtracted.
    3. ``logit_bias`` is added.
    4. Before ``min_tokens``, end-of-sequence and stop ids are excluded.
    5. ``temperature`` 0: the likeliest token, and nothing else counts. Otherwise logits are divided by it.
    6. ``min_p``: tokens less likely than this share of the likeliest are excluded.
    7. ``top_k``: all but this many likeliest tokens are excluded.
    8. ``top_p``: of what is left, the fewest likeliest tokens whose share reaches it stay.
    9. One uniform number, a function of the row's seed and the token's number alone (:func:`uniform`), picks a token by
       the inverse of the cumulative distribution over ascending ids.

    Weights exp((logit - largest) / temperature) are worked out in fp64, then rounded to integers (the largest token has
    2**45 for a vocabulary of 2**17), because sums of integers are exact: no order of summation, number of rows or
    device can move a boundary.

    Args:
        vocab_size: V, at most 2**30.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._one = 2.0 ** (62 - vocab_size.bit_length())  # the integer weight of the likeliest token

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Chooses a token for each row.

        Args:
            logits: fp32 [N, V] as the model gave them; not changed. -inf excludes a token.
            rows: the N rows' parameters and histories.

        Returns:
            N results in order. A row whose logits hold NaN or +inf, or which excludes every token, has an ``error``.

        Raises:
            ValueError: the sizes of ``logits`` do not fit.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"logits are {list(logits.shape)}, not [{len(rows)}, {self._vocab_size}]")
        if not rows:
            return []
        logits = logits.float()
        largest, first = logits.max(dim=-1)
        chosen: list[int] = first.tolist()
        errors = [_refusal(value) for value in largest.tolist()]
        others = [
            number
            for number, row in enumerate(rows)
            if errors[number] is None and (row.is_adjusted or not row.params.greedy)
        ]
        for part in self._chunks(others):
            work = logits[torch.tensor(part, dtype=torch.int64, device=logits.device)]
            for number, (token_id, error) in zip(part, self._choose(work, [rows[i] for i in part]), strict=True):
                chosen[number], errors[number] = token_id, error
        logprobs = self._logprobs(logits, rows, chosen, errors)
        return [
            SampledToken(token_id, logprobs.get(number)) if error is None else SampledToken(-1, None, error)
            for number, (token_id, error) in enumerate(zip(chosen, errors, strict=True))
        ]

    def _chunks(self, numbers: list[int]) -> Iterator[list[int]]:
        size = max(1, _CHUNK_LOGITS // self._vocab_size)
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size]

    def _choose(self, work: torch.Tensor, rows: Sequence[SamplingRow]) -> list[tuple[int, str | None]]:
        """Choices for fp32 [n, V], which is overwritten."""
        self._adjust(work, rows)
        largest, first = work.max(dim=-1)
        tokens: list[int] = first.tolist()
        errors = [_refusal_after_adjusting(value) for value in largest.tolist()]
        random = [i for i, row in enumerate(rows) if errors[i] is None and not row.params.greedy]
        if random:
            if len(random) < len(rows):
                work = work[torch.tensor(random, dtype=torch.int64, device=work.device)]
            for i, token_id in zip(random, self._draw(work, [rows[i] for i in random]), strict=True):
                tokens[i] = token_id
        return list(zip(tokens, errors, strict=True))

    def _adjust(self, work: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Steps 1 to 4, in place on fp32 [n, V]."""
        repeated, penalised, biased, excluded = _Cells(), _Cells(), _Cells(), _Cells()
        for number, row in enumerate(rows):
            params = row.params
            if params.repetition_penalty != 1:
                repeated.add(number, row.seen_ids(), params.repetition_penalty)
            if params.presence_penalty != 0 or params.frequency_penalty != 0:
                ids, counts = row.output_counts()
                penalised.add(number, ids, counts * params.frequency_penalty + params.presence_penalty)
            if params.logit_bias:
                biased.add(number, list(params.logit_bias), list(params.logit_bias.values()))
            if row.must_go_on:
                excluded.add(number, params.end_token_ids, -math.inf)
        for cells, change in (
            (repeated, lambda logit, value: torch.where(logit > 0, logit / value, logit * value)),
            (penalised, torch.sub),
            (biased, torch.add),
            (excluded, torch.add),
        ):
            if cells.numbers:
                at, values = cells.tensors(work.device)
                work[at] = change(work[at].double(), values).float()

    def _draw(self, work: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """Steps 5 to 9 for fp32 [n, V] with a finite largest logit in each row."""
        fractions = [uniform(row.seed, row.index) for row in rows]
        column = torch.tensor(
            [(row.params.temperature, row.params.min_p) for row in rows], dtype=torch.float64, device="cpu"
        )
        temperature, min_p = column.to(work.device).unsqueeze(-1).unbind(1)
        share = work.double()
        share.sub_(share.amax(dim=-1, keepdim=True)).div_(temperature).exp_()
        if any(row.params.min_p > 0 for row in rows):
            share.masked_fill_(share < min_p, 0)
        weights = share.mul_(self._one).round_().long()
        del share
        cut = [i for i, row in enumerate(rows) if row.params.top_p < 1 or self._top_k(row) is not None]
        tokens = [-1] * len(rows)
        if len(cut) < len(rows):
            ends = weights.cumsum(dim=-1)
            total = ends[:, -1:]
            fraction = torch.tensor(fractions, dtype=torch.float64, device=work.device).unsqueeze(-1)
            target = torch.minimum((fraction * total).long(), total - 1)
            tokens = torch.searchsorted(ends, target, right=True).squeeze(-1).tolist()
        if cut:
            at = torch.tensor(cut, dtype=torch.int64, device=work.device)
            cut_tokens = self._draw_cut(work[at], weights[at], [rows[i] for i in cut], [fractions[i] for i in cut])
            for i, token_id in zip(cut, cut_tokens, strict=True):
                tokens[i] = token_id
        return tokens

    def _draw_cut(
        self, work: torch.Tensor, weights: torch.Tensor, rows: Sequence[SamplingRow], fractions: Sequence[float]
    ) -> list[int]:
        """Steps 7 to 9 for rows with ``top_k`` or ``top_p``."""
        totals: list[int] = weights.sum(dim=-1).tolist()
        guesses = [min(self._top_k(row) or _NUCLEUS_GUESS, self._vocab_size) for row in rows]
        small = [i for i, guess in enumerate(guesses) if guess <= _NUCLEUS_GUESS]
        tokens = [-1] * len(rows)
        whole = [i for i, guess in enumerate(guesses) if guess > _NUCLEUS_GUESS]
        if small:
            at = torch.tensor(small, dtype=torch.int64, device=work.device)
            found = _likeliest(work[at], [guesses[i] for i in small], weights[at])
            for i, (ids, candidate_weights) in zip(small, found, strict=True):
                kept = self._kept(rows[i], candidate_weights, totals[i])
                if kept is None:
                    whole.append(i)
                else:
                    tokens[i] = _pick(ids[:kept], candidate_weights[:kept], fractions[i])
        for i in whole:
            ids = _likeliest_first(work[i].cpu().numpy())
            candidate_weights = weights[i].cpu().numpy()[ids]
            kept = self._kept(rows[i], candidate_weights, totals[i])
            tokens[i] = _pick(ids[:kept], candidate_weights[:kept], fractions[i])
        return tokens

    def _kept(self, row: SamplingRow, weights: np.ndarray, total: int) -> int | None:
        """How many of the likeliest tokens stay, None where these candidates are too few to tell."""
        top_k = self._top_k(row)
        ends = np.cumsum(weights[:top_k])
        if top_k is not None:
            total = int(ends[-1])
        if row.params.top_p == 1:
            return len(ends)
        needed = min(math.ceil(row.params.top_p * total), total)
        kept = int(np.searchsorted(ends, needed)) + 1
        return kept if kept <= len(ends) else None

    def _top_k(self, row: SamplingRow) -> int | None:
        return row.params.top_k if 0 < row.params.top_k < self._vocab_size else None

    def _logprobs(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        chosen: Sequence[int],
        errors: Sequence[str | None],
    ) -> dict[int, TokenLogprobs]:
        """By row number, for the rows that ask for them."""
        asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None and errors[i] is None]
        result: dict[int, TokenLogprobs] = {}
        for part in self._chunks(asking):
            raw = logits[torch.tensor(part, dtype=torch.int64, device=logits.device)]
            values = torch.log_softmax(raw, dim=-1)
            ids = torch.tensor([chosen[i] for i in part], dtype=torch.int64, device=raw.device).unsqueeze(-1)
            own = raw.gather(-1, ids)
            lower = torch.arange(self._vocab_size, dtype=torch.int64, device=raw.device) < ids
            ranks = 1 + ((raw > own) | ((raw == own) & lower)).sum(dim=-1)
            counts = [min(rows[i].params.logprobs or 0, self._vocab_size) for i in part]
            found = _likeliest(raw, counts, values) if any(counts) else [((), ())] * len(part)
            own_values = values.gather(-1, ids).squeeze(-1).tolist()
            for i, count, own_value, rank, tops in zip(part, counts, own_values, ranks.tolist(), found, strict=True):
                entries: list[tuple[int, float, int]] = []
                for place, (token_id, value) in enumerate(zip(*tops, strict=True)):
                    if place == count or value == -math.inf:
                        break
                    entries.append((int(token_id), float(value), place + 1))
                if chosen[i] not in [token_id for token_id, _, _ in entries]:
                    entries.append((chosen[i], own_value, rank))
                result[i] = TokenLogprobs(tuple(entries))
        return result


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that draws token ``index`` of the stream ``seed``: the upper 53 bits of the first word that
    the counter-based generator Philox-4x64-10 (Salmon et al. 2011) gives for key ``seed`` and counter ``index + 1``.

    There is no state, so other requests, preemption and the order of steps cannot change it.
    """
    # numpy steps the counter before it gives its first word
    word = int(np.random.Philox(key=seed % 2**128, counter=index).random_raw())
    return (word >> 11) * 2.0**-53


class _Cells:
    """Single logits of several rows, and a number for each."""

    def __init__(self) -> None:
        self.numbers: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, number: int, ids: Sequence[int] | np.ndarray, values: Sequence[float] | np.ndarray | float) -> None:
        """Adds logits of one row, each id once."""
        self._ids.append(np.asarray(ids, dtype=np.int64))
        self.numbers.append(np.full(len(ids), number, dtype=np.int64))
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), len(ids)))

    def tensors(self, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The cells as an index (int64 rows, int64 ids) and their values in fp64."""
        numbers, ids, values = (
            torch.from_numpy(np.concatenate(parts)).to(device) for parts in (self.numbers, self._ids, self._values)
        )
        return (numbers, ids), values


def _likeliest(
    values: torch.Tensor, counts: Sequence[int], companion: torch.Tensor
) -> list[tuple[np.ndarray, np.ndarray]]:
    """At least ``counts[i]`` likeliest ids of each row of fp32 [n, V], likeliest first, and their companions.

    Every token that equals the last is there too, so that equals can be put in the order of their ids, which a top-k of
    the library does not promise.
    """
    last = torch.tensor(counts, dtype=torch.int64, device=values.device).sub_(1).clamp_(min=0).unsqueeze(-1)
    candidates = values >= values.topk(max(counts), dim=-1).values.gather(-1, last)
    numbers, ids = candidates.nonzero(as_tuple=True)
    sizes = torch.bincount(numbers, minlength=len(counts)).tolist()
    kept, beside, all_ids = (tensor.cpu().numpy() for tensor in (values[candidates], companion[candidates], ids))
    found = []
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        order = _likeliest_first(kept[end - size : end]) + (end - size)
        found.append((all_ids[order], beside[order]))
    return found


def _likeliest_first(logits: np.ndarray) -> np.ndarray:
    """Places of fp32 [V], the largest first and of equals the lowest; int64.

    One sort of integers that hold the logit above the place takes half the time of a stable sort of floats.
    """
    bits = (logits + np.float32(0)).view(np.int32).astype(np.int64)  # the sum makes -0.0 equal to 0.0
    falling = np.where(bits < 0, bits + 2**32, 2**31 - 1 - bits)
    return np.sort(falling << 31 | np.arange(len(logits))) & (2**31 - 1)


def _pick(ids: np.ndarray, weights: np.ndarray, fraction: float) -> int:
    """The inverse of the cumulative distribution over ascending ids, at ``fraction`` of the total."""
    order = np.argsort(ids)
    ends = np.cumsum(weights[order])
    target = min(int(fraction * int(ends[-1])), int(ends[-1]) - 1)
    return int(ids[order][np.searchsorted(ends, target, side="right")])


def _refusal(largest: float) -> str | None:
    """Why a row cannot be sampled; its largest logit is NaN where any is."""
    if math.isfinite(largest):
        return None
    if largest == -math.inf:
        return "the model gave -inf for every token; check the checkpoint and the compute dtype"
    return "the model's logits hold NaN or infinity; check the checkpoint and the compute dtype"


def _refusal_after_adjusting(largest: float) -> str | None:
    if math.isfinite(largest):
        return None
    if largest == -math.inf:
        return "min_tokens excludes every token that is left; give fewer stop_token_ids or a smaller min_tokens"
    return "the penalties make logits too large for fp32; give a repetition_penalty nearer to 1"

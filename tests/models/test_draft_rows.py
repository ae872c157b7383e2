"""Rows of drafts, some of them rejected: the same bits as a run without drafts.

A step computes the last token and up to 8 drafts of what may follow; only those before the first wrong one count. Keys
and compressor tokens of the rejected ones stay in the rings until they are overwritten, and nothing may ever read them.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.session import Session, dummy_model
from tests.tiny import tiny_config

from tetrad.geometry import DRAFT_ROWS, compressor_ring, window_ring

LENGTH = 281
CONFIGS = {
    "real ratios": {"hca_ratio": 128, "sliding_window": 128, "index_topk": 16},
    "small ratios": {},
}


@pytest.fixture(scope="module", params=CONFIGS)
def case(request):
    config = tiny_config("flash", **CONFIGS[request.param])
    model = dummy_model(config, seed=5)
    tokens = torch.randint(0, config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()

    def session(**options) -> Session:
        return Session(model, kv_dtype="fp8", index_dtype="fp4", **options)

    return session, tokens, config.vocab_size, session().run("a", tokens, [LENGTH])


def drafts(tokens: list[int], place: int, count: int, right: int, vocabulary: int) -> list[int]:
    """The token at ``place`` and ``count`` drafts, of which the first ``right`` are what follows."""
    following = tokens[place + 1 : place + 1 + right]
    wrong = [(token + 1) % vocabulary for token in tokens[place + 1 + right : place + 1 + count]]
    return [tokens[place], *following, *wrong, *[0] * (count - right - len(wrong))]


@pytest.mark.parametrize("most", [1, 3, DRAFT_ROWS])
@pytest.mark.parametrize("prompt", [119, 250])
def test_rejected_drafts_change_no_bit(case, prompt, most):
    """Every step drafts and rejects another number of tokens, through multiples of 4, 16, 128 and 256.

    Rings of exactly the window, or of the tokens that one entry pools, lose what an accepted row still needs: two
    rejected drafts corrupt the next entry.
    """
    session, tokens, vocabulary, expected = case
    chance, place = random.Random(most), prompt
    other = torch.randint(0, vocabulary, (LENGTH,), generator=torch.Generator().manual_seed(9)).tolist()
    drafting = session(scatter=1)
    drafting.feed({"a": tokens[:prompt], "b": other[:33]})
    for step in range(200):
        count = min(chance.randint(max(1, most - 3), most), LENGTH - 1 - place)
        if count < 1:
            break
        right = chance.randint(0, count)
        new = {"a": drafts(tokens, place, count, right, vocabulary), "b": [other[33 + step]]}
        logits, streams = drafting.feed(new, accept={"a": 1 + right})["a"]
        end = place + 1 + right
        assert torch.isfinite(streams).all(), f"position {place}, {count} drafts: something unwritten was read"
        assert torch.equal(streams[: 1 + right], expected[1][place:end]), f"position {place}, {right} of {count} right"
        assert torch.equal(logits[: 1 + right], expected[0][place:end])
        place = end
    assert place >= 265 or most == 1


def test_rings_hold_what_draft_rows_need():
    """A ring has room for all that an accepted row reads and for all rows of a step, drafts included."""
    assert window_ring(128) == 136
    assert window_ring(16) == 24
    assert window_ring(1) == 16
    assert compressor_ring(4) == 8 + DRAFT_ROWS
    assert compressor_ring(128) == 128 + DRAFT_ROWS

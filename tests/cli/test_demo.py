"""``tetrad demo``: what a newcomer sees first."""

from __future__ import annotations

import pytest

from tetrad.cli.demo import _spans
from tetrad.cli.main import main
from tetrad.runner.sampler import SampledToken, Sampler

pytestmark = pytest.mark.slow


def test_demo(capsys):
    """It answers, shows what the indexer chose, and proves that decoding equals a recompute."""
    assert main(["demo", "--tokens", "1K"]) == 0
    out = capsys.readouterr().out
    assert "Q: What" in out
    assert "<- a fact asked for" in out
    assert "logits equal bit by bit" in out


def test_own_question(capsys, shown):
    """A question of the user's own is asked instead. Tokens are counted all the while: nothing came between the first
    line and the end."""
    assert main(["demo", "--tokens", "1K", "--question", "What is the code of nobody?"]) == 0
    out = capsys.readouterr().out
    assert [line[:2] for line in out.splitlines()].count("Q:") == 1
    assert "What is the code of nobody?" in out
    assert shown[0] == "reading and answering: 1,057 tokens, the document has 1,024"
    assert shown[-1].startswith("computing it again: 1,06")


def test_a_request_that_fails_ends_it(capsys, monkeypatch):
    """Requests that ended with an error were shown as wrong answers, behind exit code 0."""
    monkeypatch.setattr(Sampler, "sample", lambda _self, _logits, rows: [SampledToken(-1, None, "NaN") for _ in rows])
    assert main(["demo", "--tokens", "1K"]) == 1
    assert capsys.readouterr().err.endswith("tetrad: error: NaN\n")


@pytest.mark.parametrize("tokens", ["100", "10M", "many"])
def test_wrong_length(capsys, tokens):
    assert main(["demo", "--tokens", tokens]) == 2
    assert tokens in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entries", "spans"), [([], []), ([3], [(3, 3)]), ([1, 2, 5, 6, 7, 9], [(1, 2), (5, 7), (9, 9)])]
)
def test_spans(entries, spans):
    assert _spans(entries) == spans

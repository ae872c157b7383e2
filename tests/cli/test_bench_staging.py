"""``tetrad bench staging`` as it is typed."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_command(options, tetrad):
    """``tetrad bench staging`` prints a table, or JSON."""
    run = tetrad("bench", "staging", "--device=cpu", "--sequences=2", "--context=9", "--steps=3", *options)
    assert run.code == 0, run.err
    if options:
        assert json.loads(run.out)["sequences"] == 2
    else:
        assert "decode step of 2 sequences at 9 tokens" in run.out


def test_command_refuses_wrong_sizes(tetrad):
    run = tetrad("bench", "staging", "--device=cpu", "--steps=0")
    assert run.code == 2
    assert "--steps must be at least 1" in run.err

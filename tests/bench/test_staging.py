"""The measurement of a step's host part, at sizes that take no time."""

from __future__ import annotations

import json

import pytest
import torch

from tetrad.bench.staging import run_staging
from tetrad.errors import ConfigError


def test_it_runs_over_a_boundary_of_a_block():
    """At odd sizes; the context crosses into another block on the way."""
    result = run_staging(torch.device("cpu"), sequences=3, context=250, steps=7)
    assert (result.sequences, result.context, result.steps) == (3, 250, 7)
    assert min(result.schedule, result.apply, result.commit) > 0
    assert "3 sequences at 250 tokens" in result.text()
    document = json.loads(json.dumps(result.to_dict()))
    assert document["before_the_model"] == pytest.approx(document["schedule"] + document["apply"])
    assert document["versions"]["torch"]


@pytest.mark.parametrize(
    "sizes", [{"context": 10**13}, {"sequences": 10**8}, {"steps": 10**9}, {"sequences": 2**23, "context": 1}], ids=str
)
def test_sizes_that_do_not_fit(sizes):
    """They ended in a traceback of torch's allocator."""
    with pytest.raises(ConfigError, match="context"):
        run_staging(torch.device("cpu"), **sizes)


@pytest.mark.parametrize("name", ["sequences", "context", "steps"])
def test_wrong_sizes(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        run_staging(torch.device("cpu"), **{name: 0})

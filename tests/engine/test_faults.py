"""An exception anywhere in a step: every request gives what an undisturbed run gives, or ends with an error.

The caches are poisoned with NaN before every run, so that an entry that is read without being computed again shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.faults import KINDS, STAGES, Answer, Probe, Site, add_scenario, answers, bound_ops, finish, once
from tests.engine.small import (
    assert_idle,
    drawing,
    random_ids,
    small_config,
    small_engine,
    write_config,
    write_tokenizer,
)
from tetrad import LLMEngine, SamplingParams
from tetrad.core.engine_core import ATTEMPTS
from tetrad.errors import DeviceLostError
from tetrad.ops import row_invariant

pytestmark = pytest.mark.slow

ARITHMETIC = {name for _, name, function in bound_ops() if function.__module__ == row_invariant.__name__}
"""Functions of numbers alone, which every layer calls between its ops."""

LAYERS = ("CsaAttention", "HcaAttention")


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSA and an HCA layer, and a tokenizer."""
    config = small_config(num_hidden_layers=2, compress_ratios=(4, 16), hc_sinkhorn_iters=2, n_routed_experts=2)
    path = write_config(tmp_path_factory.mktemp("models") / "two-layers", config)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> LLMEngine:
    """Serves all runs one after the other: what a fault leaves behind is the next run's to stumble over."""
    return small_engine(folder, max_num_seqs=4, num_gpu_blocks_override=4, max_num_batched_tokens=128)


@pytest.fixture(scope="module")
def probe(engine: LLMEngine, patch: pytest.MonkeyPatch) -> Probe:
    return Probe(engine, patch)


@pytest.fixture(scope="module")
def undisturbed(engine: LLMEngine, probe: Probe) -> tuple[Answer, list[Site]]:
    """The answers, and the sites of a run."""
    probe.sites = []
    add_scenario(engine)
    expected = answers(finish(engine))
    return expected, probe.sites


def by_combination(sites: list[Site]) -> dict[tuple[str, str, str], list[Site]]:
    found: dict[tuple[str, str, str], list[Site]] = {}
    for site in sites:
        found.setdefault((site.function, site.layer, site.step), []).append(site)
    return found


def assert_survives(engine: LLMEngine, probe: Probe, site: Site, expected: Answer) -> None:
    engine.runner.pools.poison()
    with probe.striking(once(site.number)):
        add_scenario(engine)
        outputs = finish(engine)
        assert len(probe.sites) > site.number, "nothing was raised"
    assert answers(outputs) == expected, site


def test_the_scenario_has_what_it_should(undisturbed):
    """Every op in both kinds of layer, everything that stages a step, in steps of every kind."""
    expected, sites = undisturbed
    found = by_combination(sites)
    for kind in KINDS:
        here = {(function, layer) for function, layer, step in found if step == kind}
        functions = {function for function, _ in here}
        assert {f"{owner.__name__}.{name}" for owner, name in STAGES} <= functions | (
            {"Choice.take", "Detokenizer.append"} if "chunk" in kind else set()
        ), kind
        for layer in LAYERS:
            assert {("compressor.compress", layer), ("attention.sparse_attention", layer)} <= here, kind
        assert ("indexer.index_topk", "CsaAttention") in here
    assert all(tokens for choices in expected.values() for tokens, *_ in choices)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_one_site_of_each_combination(kind, engine, probe, undisturbed):
    """An exception once left requests hanging for ever, going on over rings that had been written already, or reading
    blocks that were never copied. One call of each function, kind of layer and kind of step raises behind its work."""
    expected, sites = undisturbed
    for (function, _, step), calls in by_combination(sites).items():
        if step == kind and function.rpartition(".")[2] not in ARITHMETIC:
            assert_survives(engine, probe, calls[len(calls) // 2], expected)


@pytest.mark.faults_all
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("before", [True, False], ids=["before the call", "behind the call"])
def test_an_exception_at_every_site(before, engine, probe, undisturbed, monkeypatch):
    """As above, at each of some thousand calls, before its work and behind it."""
    expected, sites = undisturbed
    monkeypatch.setattr(probe, "before", before)
    for site in sites:
        assert_survives(engine, probe, site, expected)


def only_in(function: str, step: str):
    """Picks the first call of a function in a step of a kind."""
    struck: list[Site] = []

    def picks(site: Site) -> bool:
        if struck or (site.function, site.step) != (function, step):
            return False
        struck.append(site)
        return True

    return picks


@pytest.mark.parametrize("place", ["Sampler.sample", "Scheduler.commit", "RequestTable.draw"])
def test_a_failure_behind_the_model_hangs_nothing(place, engine, probe, undisturbed):
    """Raised in the sampler or at commit, ``step`` once returned nothing for ever while requests stayed unfinished."""
    expected, _ = undisturbed
    engine.runner.pools.poison()
    with probe.striking(only_in(place, "decode")):
        add_scenario(engine)
        assert answers(finish(engine)) == expected


def test_a_failure_before_the_copies_of_a_fork(engine, probe, undisturbed, monkeypatch):
    """Raised between scheduling and a fork's copies, the forks once read blocks that nobody had written."""
    expected, _ = undisturbed
    engine.runner.pools.poison()
    monkeypatch.setattr(probe, "before", True)
    with probe.striking(only_in("CachePools.copy", "fork")):
        add_scenario(engine)
        assert answers(finish(engine)) == expected


def test_a_failure_behind_a_compressor(folder):
    """In the second chunk of a long prompt the rings were overwritten, the step ran again over them, and log
    probabilities were off by up to 0.17."""
    engine = small_engine(folder, max_model_len=1024, max_num_batched_tokens=400, max_num_seqs=1)
    prompt = random_ids(971, 9)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        probe = Probe(engine, patch)
        results = []
        for picks in (lambda site: False, only_in("compressor.update_state", "later chunk")):
            engine.runner.pools.poison()
            with probe.striking(picks):
                engine.add_request(prompt, params, "long")
                results.append(answers(finish(engine)))
    assert results[0] == results[1]
    assert engine.core.computed_rows == 2 * 972 + 400


def test_two_failures_in_a_row_end_with_an_error(engine, probe, undisturbed):
    """Computing anew for ever would hang. The error says what happened, and later requests are served."""
    expected, _ = undisturbed
    with probe.striking(lambda site: site.function == "Sampler.sample"):
        add_scenario(engine)
        outputs = finish(engine)
    for output in outputs.values():
        assert {one.finish_reason for one in output.outputs} == {"error"}
        assert output.error is not None
        assert f"{ATTEMPTS} of its steps failed" in output.error
        assert "FaultError: at Sampler.sample" in output.error
    engine.runner.pools.poison()
    add_scenario(engine)
    assert answers(finish(engine)) == expected


def test_requests_added_after_a_failure_are_served(engine, probe, undisturbed):
    """Between the failed step and its repetition nothing is special."""
    expected, _ = undisturbed
    with probe.striking(only_in("compressor.update_state", "later chunk")):
        engine.add_request(random_ids(200, 4), SamplingParams(max_tokens=2, temperature=0), "first")
        while not any(site.step == "later chunk" for site in probe.sites):
            engine.step()
    engine.abort("first")
    add_scenario(engine)
    assert answers(finish(engine)) == expected


@pytest.mark.parametrize("function", ["Choice.take", "Detokenizer.append"])
def test_text_that_cannot_be_made_ends_its_request(function, engine, probe, undisturbed):
    """A tokenizer that fails for good ends the requests in an error, not the caller's loop; one failure changes
    nothing, as the other tests show."""
    with probe.striking(lambda site: site.function == function):
        add_scenario(engine)
        outputs = finish(engine)
    for output in outputs.values():
        assert output.error is not None
        assert f"FaultError: at {function}" in output.error
        assert {one.finish_reason for one in output.outputs} == {"error"}


def test_a_nan_row_ends_alone(engine, undisturbed, monkeypatch):
    """Its request ends with an error of its own; no other is computed anew."""
    expected, _ = undisturbed
    forward = engine.runner.forward
    add_scenario(engine)

    def with_nan(rows):
        logits = forward(rows)
        names = [engine._choices[one.number].request.request_id for one in drawing(engine)]
        for place, name in enumerate(names):
            if name == "short":
                logits[place] = torch.nan
        return logits

    monkeypatch.setattr(engine.runner, "forward", with_nan)
    outputs = finish(engine)
    assert "NaN" in str(outputs["short"].error)
    del outputs["short"]
    assert answers(outputs) == {name: choices for name, choices in expected.items() if name != "short"}


def test_a_lost_device_refuses_what_comes_after_it(folder, monkeypatch):
    """Everything ends at once; whoever adds a request afterwards is told, instead of waiting for it."""
    engine = small_engine(folder, max_num_seqs=4)
    add_scenario(engine)
    engine.step()

    def lost(plan):
        raise DeviceLostError("the device is lost (no answer); build the engine anew")

    monkeypatch.setattr(engine.runner, "execute", lost)
    outputs = finish(engine)
    assert {output.error for output in outputs.values()} == {"the device is lost (no answer); build the engine anew"}
    assert set(outputs) == {"long", "forks", "short"}
    with pytest.raises(DeviceLostError, match="build the engine anew"):
        engine.add_request([5, 6])
    with pytest.raises(DeviceLostError, match="build the engine anew"):
        engine.add_requests([[5, 6]])
    assert_idle(engine)

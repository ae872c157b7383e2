"""Fifty steps of training on the CPU: the loss falls, a seed decides everything, and legs give what one run gives."""

import json
from pathlib import Path

import pytest
import torch
from data import Batches, Stage, documents, sequence
from model import Model
from state import LIMIT, _compact, load_state, save_state
from train import RECIPES, load_final, parse, rate_factor, run, save_final


def train(folder: Path, *arguments: str) -> dict[str, torch.Tensor]:
    options = ["--recipe", "tiny", "--device", "cpu", "--muon", "--every", "5", "--out", str(folder), *arguments]
    return {name: value.clone() for name, value in run(parse(options)).state_dict().items()}


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("one")
    return folder, train(folder)


def test_loss_falls(one_run: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Also the indexers' loss, which nothing but their own objective trains."""
    lines = [json.loads(line) for line in (one_run[0] / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 50
    assert lines[-1]["answer"] < lines[0]["answer"] - 1.0
    assert lines[-1]["other"] < lines[0]["other"] - 0.8
    assert lines[5]["index"] < lines[0]["index"]


def test_legs_equal_one_run(one_run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """The second leg starts inside a stage; a leg that lost its moments, its place or its biases would drift."""
    train(tmp_path / "a", "--stop", "13")
    state = tmp_path / "a" / "state.safetensors"
    assert state.stat().st_size <= 16 * 2**20
    found = train(tmp_path / "b", "--state", str(state))
    assert set(found) == set(one_run[1])
    for name, value in one_run[1].items():
        assert torch.equal(found[name], value), name


def test_final_weights_are_what_training_used(one_run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """What is saved is the rounded model: rounding it again changes nothing."""
    saved = load_final(one_run[0] / "model.safetensors")
    model = Model(RECIPES["tiny"][0])
    model.load_native(saved)
    save_final(model, tmp_path, quantised=True)
    again = load_final(tmp_path / "model.safetensors")
    assert set(again) == set(saved)
    for name, value in saved.items():
        assert torch.equal(again[name], value), name


def test_compact_state_keeps_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model too large for an exact state loses its moments, not its weights."""
    model, other = Model(RECIPES["tiny"][0], 1), Model(RECIPES["tiny"][0], 2)
    monkeypatch.setattr("state.LIMIT", 1000)
    assert save_state(tmp_path / "state.safetensors", model, [], 7) == "compact"
    assert load_state(tmp_path / "state.safetensors", other, []) == (7, False)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0.07, atol=1e-2, msg=name)
    assert sum(v.numel() * v.element_size() for v in _compact(Model(RECIPES["full"][0])).values()) < LIMIT


def test_sequences_fit_and_mark_answers() -> None:
    """A mark one place off would train the model to answer before it is asked."""
    for seed, length in ((1, 256), (2, 320), (3, 1024), (4, 8192)):
        rng = documents.random.Random(seed)
        tokens, answer, start = sequence(rng, length, varied=0.6, density=4.0)
        assert len(tokens) == len(answer) == length
        assert not any(answer[:start])
        text = bytes(max(0, token - 8) for token in tokens).decode()
        marked = "".join(text[place + 1] for place in range(length - 1) if answer[place])
        wanted = "".join(line[2:] + "\n" for line in text[start:].splitlines() if line.startswith("A:"))
        assert marked == wanted


def test_batches_and_rates_depend_on_the_step_alone() -> None:
    """Legs read the same data wherever they begin, and a cycle of the rate does not see the leg's end."""
    stages = [
        Stage(4, (256,), tokens=512, rows=8),
        Stage(6, (256, 512), gaps=1.0, varied=0.5, peak=0.5, tokens=512, rows=8),
    ]
    one, two = Batches(stages, 5), Batches(stages, 5)
    assert torch.equal(one[7].tokens, two[7].tokens)
    assert torch.equal(one[7].positions, two[7].positions)
    assert not torch.equal(one[7].tokens, Batches(stages, 6)[7].tokens)
    jumps = one[7].positions.diff() - 1
    assert (jumps % 128 == 0).all()
    assert (jumps >= 0).all()
    rates = [rate_factor(stages, step, 0, 0.4) for step in range(10)]
    assert (max(rates[:4]), max(rates[4:])) == (1.0, 0.5)
    assert rates[3] < 1.0
    assert rates[9] < 0.5

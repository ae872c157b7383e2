"""Fifty steps of training on the CPU: the loss falls, a seed decides everything, and legs give what one run gives."""

import json
from dataclasses import replace
from pathlib import Path

import export
import pytest
import torch
from data import Batches, Stage, documents, sequence
from evaluate import check_room
from model import Model
from safetensors.torch import save_file
from state import LIMIT, _compact, load_state, save_state
from train import RECIPES, load_final, parse, per_document, rate_factor, run, save_final

pytestmark = pytest.mark.slow


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


FOLDER = Path(__file__).resolve().parents[2] / "training"


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graphs"], "--graphs captures CUDA graphs, and --device is cpu; leave --graphs out"),
        (["--state", "nowhere/state.safetensors"], "--state nowhere/state.safetensors: there is no such file"),
        (["--state", "."], "there is no such file"),
        (["--evaluate", "8192"], "'8192' is not length:questions:format[:topk[:facts]]; write 8192:1024:fp4"),
        (["--evaluate", "8192:1024:fp5"], "the format 'fp5' is none of fp4, fp4-plain, fp8, bf16, dense"),
        (["--evaluate", "8192:many:fp4"], "is not length:questions:format"),
        (["--evaluate", "8192:8:fp4,"], "is not length:questions:format"),
        (["--evaluate", "8192:8:fp4:1:2:3"], "is not length:questions:format"),
        (["--evaluate", "8192:0:fp4"], "at least 1"),
        (["--evaluate", "8192:8:fp4:0"], "at least 1"),
        (["--evaluate", "10:8:fp4"], "at least 256"),
        (["--device", "gpu"], "'gpu' is no device to train on; write cpu or cuda"),
        (["--every", "0"], "--every: '0' is not a whole number from 1"),
        (["--stop", "-3"], "'-3' is not a whole number from 1"),
        (["--workers", "-1"], "'-1' is not a whole number from 0"),
        (["--scale", "0"], "--scale: '0' is not a number above 0"),
        (["--seconds", "soon"], "'soon' is not a number above 0"),
        (["--out", __file__], "is a file; name a folder"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """They ended in tracebacks, some of them after the training; now a line says what to change, before anything."""
    assert message in _refused(capsys, "--recipe", "tiny", "--device", "cpu", "--out", "unused", *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch sees no GPU here" in _refused(capsys, "--device", "cuda", "--out", "unused")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--evaluate", "2048:32:fp4:8:700"], "--evaluate 2048:32:fp4:8:700: the document is too short"),
        (["--tokens", "300"], "--tokens 300 is less than the recipe's longest sequence of 512"),
    ],
)
def test_what_would_fail_at_the_end_fails_at_the_start(tmp_path: Path, arguments: list[str], message: str) -> None:
    options = parse(["--recipe", "tiny", "--device", "cpu", "--out", str(tmp_path / "leg"), *arguments])
    with pytest.raises(ValueError, match=message):
        run(options)
    assert not (tmp_path / "leg").exists()


def test_states_that_do_not_fit(tmp_path: Path) -> None:
    """Another recipe's state, another file, no file of tensors, and a state with nothing left to do."""
    state = tmp_path / "state.safetensors"
    model = Model(RECIPES["tiny"][0])
    save_state(state, model, [], 50)
    options = ["--recipe", "tiny", "--device", "cpu", "--out", str(tmp_path / "leg"), "--state", str(state)]
    with pytest.raises(ValueError, match="is after step 50; nothing is left"):
        run(parse(options))
    with pytest.raises(ValueError, match=r"of another model: .* continue with the --recipe"):
        load_state(state, Model(replace(RECIPES["tiny"][0], hidden_size=32)), [])
    save_file({"some": torch.ones(3)}, state)
    with pytest.raises(ValueError, match="is no state of a leg"):
        load_state(state, model, [])
    state.write_text("words")
    with pytest.raises(ValueError, match="is no safetensors file"):
        load_state(state, model, [])
    assert not (tmp_path / "leg").exists()


def test_commands_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's command lacked --out. Every command is parsed as written; what needs a GPU is given one."""
    lines = [line.strip() for line in (FOLDER / "README.md").read_text().splitlines()]
    commands = [line.split()[2:] for line in lines if line.startswith("python train.py")]
    assert len(commands) >= 5
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("pathlib.Path.is_file", lambda path: True)
    recipes = {parse(command).recipe for command in commands}
    assert recipes == {"full", "tiny", "cpu", "short"}
    asked = [evaluation for command in commands for evaluation in parse(command).evaluate]
    for each in asked:
        check_room(RECIPES["cpu"][0], each.length, each.questions, per_document=per_document(each))


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "name the run's folder"), (["nowhere", "out"], "nowhere has no config.json")]
)
def test_wrong_arguments_of_export(arguments: list[str], message: str) -> None:
    """An IndexError said nothing about what to write."""
    assert message in (export.main(arguments) or "")

"""Recall through the engine: the measurement itself, and a small one with the bundled model."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from tetrad import LLM, EngineArgs, SamplingParams, bundled
from tetrad.cli.main import main
from tetrad.errors import ConfigError, RequestError
from tetrad.eval import picture, recall, report
from tetrad.eval.documents import STOP, make_document
from tetrad.eval.recall import Answer, RecallResult, RecallSettings, Variant, _share, document_of, run_recall
from tetrad.eval.statistics import interval_of_mean, interval_of_share
from tetrad.runner.sampler import SampledToken, Sampler

pytestmark = pytest.mark.slow

SMALL = {"model": bundled.NAME, "device": "cpu", "max_model_len": 2048, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def measured() -> RecallResult:
    """20 questions about one document of 4096 tokens under each variant."""
    settings = RecallSettings(
        lengths=(4096,),
        depths=(0.5,),
        variants=tuple(Variant.parse(name) for name in ("fp4", "bf16", "fp4-plain")),
        questions=20,
    )
    return run_recall(EngineArgs(model=bundled.NAME, device="cpu", dtype="float32"), settings)


def test_the_bundled_model_remembers(measured):
    """At 4096 tokens with the top 48 of 1024 entries nearly every answer is right, with a 4-bit index as with bf16."""
    recall = {cell.variant: cell.recall for cell in report.cells(measured)}
    assert recall["bf16"] >= 0.9
    assert recall["fp4"] >= 0.9


def test_every_variant_got_every_question(measured):
    """Differences are paired, so a question that one variant lost would shift all that follow."""
    places = {}
    for answer in measured.answers:
        places.setdefault(answer.variant, set()).add((answer.depth, answer.document, answer.question))
    assert set(places) == {"bf16", "fp4", "fp4-plain"}
    assert all(len(found) == 20 and found == places["bf16"] for found in places.values())


def test_what_the_quantised_index_found(measured):
    """FP4 finds most of what bf16 chose, and less without the rotation; bf16 is not compared with itself."""
    found = {cell.variant: cell.found for cell in report.cells(measured)}
    assert found["bf16"] is None
    assert 0.7 < found["fp4"] <= 1.0
    assert found["fp4-plain"] < found["fp4"]


def test_table_and_json(measured):
    """The table has a row per variant, JSON the same figures."""
    lines = report.table(measured).splitlines()
    assert len(lines) == 2 + 3
    document = json.loads(json.dumps(report.to_dict(measured, answers=True)))
    assert len(document["answers"]) == 60
    assert {cell["questions"] for cell in document["cells"]} == {20}


def test_picture(measured, tmp_path):
    """A PNG appears; where it cannot be written the error names the file."""
    picture.picture(measured, tmp_path / "recall.png")
    assert (tmp_path / "recall.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ConfigError, match="nowhere"):
        picture.picture(measured, tmp_path / "nowhere" / "recall.png")


def _texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_what_the_picture_says(measured):
    """It had a red-green map, no n, no interval, no model, and left out what separates the formats."""
    figure = picture.draw(measured)
    texts = "\n".join(_texts(figure))
    for wanted in (f"model {bundled.NAME}", "n = 20", "entries found of those that bf16 chose", "95 % intervals"):
        assert wanted in texts
    assert report.command(measured) in texts
    assert {image.get_cmap().name for axis in figure.axes for image in axis.images} == {"cividis"}
    (legend,) = [legend for part in figure.subfigs for legend in part.legends]
    assert [text.get_text() for text in legend.get_texts()] == ["index bf16", "index fp4", "index fp4-plain"]


def test_numbers_can_be_read_on_their_fields():
    """100 stood in black on dark green: white on dark, black on light."""
    right = [Answer("bf16", 1024, depth, 0, 0, "single", "a", got, None) for depth, got in ((0.1, "a"), (0.9, "b"))]
    figure = picture.draw(RecallResult(RecallSettings(lengths=(1024,), depths=(0.1, 0.9)), 48, "cpu", right))
    assert [(text.get_text(), text.get_color()) for text in figure.axes[0].texts] == [("100", "black"), ("0", "white")]


def test_a_picture_without_a_baseline_says_so(measured):
    alone = [answer for answer in measured.answers if answer.variant == "fp4"]
    alone = [dataclasses.replace(answer, found=None) for answer in alone]
    texts = _texts(picture.draw(dataclasses.replace(measured, answers=alone)))
    assert any("not measured without bf16" in text for text in texts)


def test_json_read_again(measured, tmp_path, capsys):
    """What was measured for an hour can be drawn again; the table is the same."""
    document = json.loads(json.dumps(report.to_dict(measured, answers=True)))
    assert report.cells(report.from_dict(document)) == report.cells(measured)
    (tmp_path / "recall.json").write_text(json.dumps(document))
    flags = ["eval", "recall", "--from-json", str(tmp_path / "recall.json")]
    assert main(flags) == 0
    assert capsys.readouterr().out.strip() == report.table(measured)
    assert main([*flags, "--lengths", "2K"]) != 0
    assert "--lengths has no meaning beside it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[]", "no result of tetrad eval recall"),
        ('{"settings": {}}', "--json --answers"),
        ('{"settings": {"variants": []}, "answers": []}', "no result of"),
        ('{"settings": {"variants": [], "lengths": [1]}, "answers": []}', "no result of"),
    ],
)
def test_json_that_is_no_result(tmp_path, capsys, text, message):
    """An error that names the file or what is missing, no traceback."""
    path = tmp_path / "some.json"
    if text is not None:
        path.write_text(text)
    assert main(["eval", "recall", "--from-json", str(path)]) != 0
    assert message in capsys.readouterr().err


def test_a_picture_without_a_folder_is_refused_before_the_measurement(tmp_path, capsys, monkeypatch):
    """An hour's measurement was made first, and then there was nowhere to draw it."""
    monkeypatch.setattr("tetrad.cli.evaluate.run_recall", lambda *args, **options: pytest.fail("it measured"))
    assert main(["eval", "recall", "--png", str(tmp_path / "nowhere" / "recall.png")]) != 0
    assert "there is no folder" in capsys.readouterr().err


def test_interval_of_a_share():
    """All right is not certain: Wilson's interval of 20 of 20 ends at 83.9 %, that of 50 of 100 at 40.4 and 59.6."""
    assert interval_of_share(20, 20) == (pytest.approx(0.8389, abs=1e-4), 1.0)
    assert interval_of_share(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert all(np.isnan(interval_of_share(0, 0)))


@pytest.mark.parametrize("base", [256, 384, 512])
def test_same_answer_at_every_residue(base):
    """A fact once asked at a prompt length just over a multiple of 128 fell into the entry that was being completed."""
    llm = LLM(model=bundled.NAME, device="cpu", dtype="float32", index_cache_dtype="fp4", max_model_len=1024)
    prompts, answers = [], []
    for length in range(base - 5, base + 6):
        # as many facts whatever the length: the same fact, with more or less filler around it
        question = (document := make_document(11, length, 1, kinds=("single",), facts=3)).questions[0]
        prompts.append(document.text + question.prompt)
        answers.append(question.answer)
    assert len(set(answers)) == 1
    assert {len(prompt) % 4 for prompt in prompts} == {0, 1, 2, 3}
    outputs = llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0.0, stop=STOP))
    assert [output.outputs[0].text for output in outputs] == answers


def test_share_of_the_exact_choice():
    """-1 is no entry; layers are averaged."""
    exact = {2: torch.tensor([1, 2, 3, -1]), 4: torch.tensor([5, 6, -1, -1])}
    chosen = {2: torch.tensor([2, 3, 9, -1]), 4: torch.tensor([5, 6, -1, -1])}
    assert _share(chosen, exact) == pytest.approx((2 / 3 + 1) / 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp4", Variant("fp4", "fp4")),
        ("fp4-plain", Variant("fp4-plain", "fp4", hadamard=False)),
        ("fp8/2", Variant("fp8/2", "fp8", topk_divisor=2)),
        ("bf16-plain/4", Variant("bf16-plain/4", "bf16", hadamard=False, topk_divisor=4)),
    ],
)
def test_variant_names(name, expected):
    assert Variant.parse(name) == expected


@pytest.mark.parametrize("name", ["fp5", "fp4-", "fp4-bare", "fp4/0", "fp4/x", "", "fp4/"])
def test_wrong_variant_names(name):
    with pytest.raises(ConfigError, match="variant"):
        Variant.parse(name)


@pytest.mark.parametrize(
    "wrong", [{"lengths": ()}, {"lengths": (100,)}, {"depths": (1.5,)}, {"questions": 0}, {"documents": 0}]
)
def test_wrong_settings(wrong):
    with pytest.raises(ConfigError):
        RecallSettings(**wrong)


def test_a_document_too_short_for_its_facts():
    with pytest.raises(ConfigError, match="fewer questions"):
        document_of(RecallSettings(lengths=(512,), questions=40), 512, 0.5, 0)


def test_documents_differ_by_cell_and_seed():
    """Every cell has a document of its own, the same on every run."""
    settings = RecallSettings(questions=4)
    cells = [(length, depth, number) for length in (2048, 4096) for depth in (0.1, 0.9) for number in (0, 1)]
    texts = [document_of(settings, *cell).text for cell in cells]
    assert len(set(texts)) == len(cells)
    assert texts == [document_of(settings, *cell).text for cell in cells]
    other = dataclasses.replace(settings, seed=1)
    assert document_of(other, *cells[0]).text != texts[0]


def test_interval_of_a_paired_difference():
    """No difference on any question is an interval of no width; a clear one excludes zero."""
    assert interval_of_mean(np.zeros(500)) == (0.0, 0.0)
    values = np.array([-1.0] * 30 + [0.0] * 970)
    low, high = interval_of_mean(values)
    assert -0.042 < low < -0.03 < high < -0.018


def test_difference_is_paired():
    """Two variants with the same recall on different questions: no difference, but an interval that says how sure."""
    settings = RecallSettings(lengths=(1024,), depths=(0.5,))

    def answers(variant: str, wrong: set[int]) -> list[Answer]:
        return [
            Answer(variant, 1024, 0.5, 0, number, "single", "a", "b" if number in wrong else "a", None)
            for number in range(100)
        ]

    result = RecallResult(settings, 48, "cpu", answers("bf16", {1, 2, 3}) + answers("fp4", {4, 5, 6}))
    cell = next(cell for cell in report.cells(result) if cell.variant == "fp4")
    assert cell.difference == 0.0
    assert cell.low is not None
    assert cell.low < 0 < (cell.high or 0)


def test_command(capsys):
    """The command prints JSON; a wrong list is an error that names the flag."""
    flags = ["--device", "cpu", "--dtype", "float32", "--lengths", "1K", "--depths", "0.5", "--questions", "2"]
    assert main(["eval", "recall", *flags, "--variants", "fp4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"][0]["questions"] == 2
    assert main(["eval", "recall", *flags, "--depths", "0.5,deep"]) == 2
    assert "--depths" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted after 3 answers"),
        (RuntimeError("no memory"), 1, "RuntimeError: no memory; the report is of the 3 answers before it"),
    ],
    ids=["an interrupt", "an error"],
)
def test_what_ends_it_early_keeps_the_answers(monkeypatch, capsys, end, code, said):
    """A measurement of an hour once printed nothing when its time was up, or when its last length was too much."""
    asked = 0

    def ask(engine, variant, cells, settings, exact):
        nonlocal asked
        for number in range(2):
            asked += 1
            if asked == 4:
                raise end
            yield Answer(variant.name, 1024, 0.5, 0, number, "single", "a", "a", None)

    monkeypatch.setattr("tetrad.eval.recall._ask", ask)
    monkeypatch.setattr("tetrad.eval.recall._engine", lambda args, settings, variant: LLM(**SMALL).engine)
    flags = ["--device", "cpu", "--lengths", "1K", "--depths", "0.5", "--questions", "2", "--variants", "bf16,fp4"]
    assert main(["eval", "recall", *flags, "--json"]) == code
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["interrupted"] == (code == 130)
    assert [(cell["variant"], cell["questions"]) for cell in document["cells"]] == [("bf16", 2), ("fp4", 1)]
    assert said in captured.err


@pytest.mark.parametrize("seed", [1, 2**40])
def test_a_negative_seed_makes_a_document_of_its_own(seed):
    """``--seed -1`` gave the document of ``--seed 1``."""
    first, second, again = (make_document(number, 1000, 1, facts=3) for number in (seed, -seed, -seed))
    assert second == again
    assert second.text != first.text


def test_a_request_that_fails_is_no_wrong_answer(monkeypatch):
    """Questions that ended with an error, such as NaN in the logits, were counted as answered wrongly."""
    monkeypatch.setattr(Sampler, "sample", lambda _self, _logits, rows: [SampledToken(-1, None, "NaN") for _ in rows])
    settings = RecallSettings(lengths=(1024,), depths=(0.5,), variants=(Variant.parse("fp4"),), questions=3)
    with pytest.raises(RequestError, match="NaN"):
        run_recall(EngineArgs(model=bundled.NAME, device="cpu"), settings)


def test_a_divided_top_k_builds_one_engine(monkeypatch):
    """Two engines stood side by side, each with weights and caches, only to learn the model's top-k."""
    built = []

    class Counted(recall.LLMEngine):
        def __init__(self, *args, **options):
            built.append(args)
            super().__init__(*args, **options)

    monkeypatch.setattr(recall, "LLMEngine", Counted)
    settings = RecallSettings(lengths=(1024,), variants=(Variant.parse("fp4/3"),), questions=2)
    engine = recall._engine(EngineArgs(model=bundled.NAME, device="cpu"), settings, settings.variants[0])
    assert len(built) == 1
    assert engine.config.model.index_topk == 16

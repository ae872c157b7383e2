"""``tetrad generate``: where prompts come from, where results go, and what a bad one costs the others."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.small import EOS, FIRST_BYTE, bytes_of, script
from tetrad import LLM, SamplingParams
from tetrad.cli import generate
from tetrad.cli.main import main
from tetrad.frontend.llm_engine import LLMEngine

ENGINE = ("--load-dummy", "--device=cpu", "--max-model-len=128", "--max-num-seqs=2", "--kv-cache-memory-gb=0.5")
GREEDY = ("--temperature=0", "--max-tokens=5", "--ignore-eos")
PROMPT = "hello, wörld"


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    """What the library gives for a prompt."""
    llm = LLM(model=str(model), load_format="dummy", device="cpu", max_model_len=128, max_num_seqs=2)

    def give(prompt: str | list[int], **changes: Any) -> Any:
        params = SamplingParams(**{"temperature": 0, "max_tokens": 5, "ignore_eos": True} | changes)
        return llm.generate([prompt], params)[0]

    return give


# ---- one prompt ----


def test_a_prompt(tetrad, model, expected):
    run = tetrad("generate", model, *ENGINE, *GREEDY, "--prompt", PROMPT)
    assert run.code == 0
    assert run.out == expected(PROMPT).outputs[0].text + "\n"
    assert "index cache fp4 (the reference back end supports fp4 on cpu), up to 128 tokens, 2 blocks" in run.err
    assert f"{len(expected(PROMPT).prompt_token_ids)} tokens read, 5 written in" in run.err


def test_every_way_to_give_the_same_prompt(tetrad, model, tmp_path):
    """The text, a file, standard input by name and by default, and the token ids: the same JSON but for the ids."""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    head = ("generate", model, *ENGINE, *GREEDY, "--json")
    runs = [
        tetrad(*head, "--prompt", PROMPT),
        tetrad(*head, "--prompt-file", file),
        tetrad(*head, "--prompt-file", "-", stdin=PROMPT),
        tetrad(*head, stdin=PROMPT),
    ]
    records = [json.loads(run.out) for run in runs]
    for record in records:
        record.pop("metrics")
    assert records[1:] == records[:1] * 3
    ids = records[0]["prompt_token_ids"]
    by_ids = json.loads(tetrad(*head, "--prompt-token-ids", ",".join(map(str, ids))).out)
    assert by_ids["outputs"] == records[0]["outputs"]
    assert (by_ids["prompt"], by_ids["prompt_token_ids"]) == (None, ids)


def test_json_is_complete(tetrad, model, expected):
    run = tetrad("generate", model, *ENGINE, *GREEDY, "--json", "--prompt", PROMPT, "--logprobs", 2)
    record = json.loads(run.out)
    wanted = expected(PROMPT, logprobs=2).to_dict()
    assert record["outputs"] == wanted["outputs"]
    assert record["request_id"] == "0"
    assert record["prompt"] == PROMPT
    assert record["finished"] is True
    assert record["error"] is None
    assert all(str(token) in entry for token, entry in zip(
        record["outputs"][0]["token_ids"], record["outputs"][0]["logprobs"], strict=True
    ))  # fmt: skip


def test_several_prompts_are_named(tetrad, model, expected):
    run = tetrad("generate", model, *ENGINE, *GREEDY, "--prompt", "one", "--prompt", "two")
    one, two = (expected(prompt).outputs[0].text for prompt in ("one", "two"))
    assert run.out == f"--- prompt 0, choice 0 (length)\n{one}\n--- prompt 1, choice 0 (length)\n{two}\n"


def test_sampling_flags_reach_the_sampler(tetrad, model, expected, monkeypatch):
    """All of them, in either spelling."""
    seen: list[SamplingParams] = []
    add_request = LLMEngine.add_request

    def record(self: LLMEngine, prompt: Any, params: SamplingParams, request_id: str | None = None) -> str:
        seen.append(params)
        return add_request(self, prompt, params, request_id)

    monkeypatch.setattr(LLMEngine, "add_request", record)
    flags = (
        *("--n=2", "--max_tokens=7", "--min-tokens=1", "--logprobs=3", "--temperature=0.5", "--top_p=0.9", "--top-k=5"),
        *("--min_p=0.1", "--presence_penalty=0.5", "--frequency-penalty", "-0.5", "--repetition_penalty=1.1"),
        *("--stop=xyz", "--stop", "z_z", "--stop_token_ids=5,6", "--ignore_eos"),
    )
    run = tetrad("generate", model, *ENGINE, *flags, "--logit-bias", '{"5": -3.5}', "--prompt", "a", "--seed", 3)
    assert run.code == 0
    assert seen == [
        SamplingParams(
            n=2,
            max_tokens=7,
            min_tokens=1,
            logprobs=3,
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            stop=["xyz", "z_z"],
            stop_token_ids=[5, 6],
            ignore_eos=True,
            logit_bias={5: -3.5},
        )
    ]
    again = tetrad("generate", model, *ENGINE, *flags, "--logit-bias", '{"5": -3.5}', "--prompt", "a", "--seed", 3)
    assert again.out == run.out, "--seed repeats a run"


def test_ids_where_there_is_no_tokenizer(tetrad, ids_model):
    run = tetrad("generate", ids_model, *ENGINE, *GREEDY, "--prompt-token-ids", "5 6,7")
    assert run.code == 0
    assert len([int(token) for token in run.out.split()]) == 5


def test_an_empty_text_is_an_empty_line(tetrad, model, monkeypatch):
    """An output that ended at once was once shown as the id of its end-of-sequence token."""
    built = generate.LLMEngine

    def scripted(*arguments: Any, **options: Any) -> LLMEngine:
        engine = built(*arguments, **options)
        script(engine, {"request-0": [EOS]})
        return engine

    monkeypatch.setattr(generate, "LLMEngine", scripted)
    assert tetrad("generate", model, *ENGINE, "--temperature", 0, "--prompt", "x").out == "\n"


# ---- many prompts ----


def test_jsonl(tetrad, model, expected, tmp_path):
    """Text and ids, parameters of a line's own over those of the flags, names, and blank lines."""
    lines = [
        json.dumps({"prompt": PROMPT}),
        "",
        json.dumps({"prompt": bytes_of("ab"), "max_tokens": 2, "request_id": "mine"}),
        json.dumps({"prompt": "ab", "n": 2, "temperature": 1.0, "seed": 4, "request_id": 7}),
        json.dumps({"prompt": "null name", "request_id": None}),
    ]
    file = tmp_path / "in.jsonl"
    file.write_text("\r\n".join(lines) + "\n", encoding="utf-8")
    run = tetrad("generate", model, *ENGINE, *GREEDY, "--input-jsonl", file)
    assert run.code == 0
    records = [json.loads(line) for line in run.out.splitlines()]
    assert [record["request_id"] for record in records] == ["line 1", "mine", 7, "line 5"]
    wanted = [
        expected(PROMPT),
        expected(bytes_of("ab"), max_tokens=2),
        expected("ab", n=2, temperature=1.0, seed=4),
        expected("null name"),
    ]
    assert [record["outputs"] for record in records] == [output.to_dict()["outputs"] for output in wanted]
    assert tetrad("generate", model, *ENGINE, *GREEDY, "--input-jsonl", "-", stdin=file.read_text()).code == 0


BAD_LINES = [
    ("nonsense", r"line 2: not JSON"),
    ("[1, 2]", 'line 2: a line is a JSON object with a "prompt"'),
    ('{"text": "x"}', 'line 2: a line is a JSON object with a "prompt"'),
    ('{"prompt": "x", "max_token": 3}', "line 2: unknown keys max_token; known are"),
    ('{"prompt": "x", "temperature": 9}', "line 2: temperature=9 is not allowed"),
    ('{"prompt": "x", "n": 2}', "line 2: n=2 is not allowed: with temperature 0"),
    ('{"prompt": ""}', "the prompt is empty"),
    ('{"prompt": null}', "a prompt is text or a list of token ids, not null"),
    ('{"prompt": [999]}', "token id 999 is out of range"),
    ('{"prompt": "' + "x" * 200 + '"}', "maximum context length is 128 tokens"),
    ('{"prompt": "\\ud800"}', "lone surrogate"),
    ('{"prompt": [' + "9" * 5000 + "]}", "line 2: not JSON (Exceeds the limit"),
    ("[" * 100_000, "line 2: not JSON (maximum recursion depth"),
]


def test_bad_lines_do_not_stop_the_others(tetrad, model, expected, tmp_path):
    """One malformed line once ended the whole batch. Every error says which line and why; the exit code is 1."""
    file = tmp_path / "in.jsonl"
    good = json.dumps({"prompt": PROMPT})
    text = expected(PROMPT).outputs[0].text
    for line, message in BAD_LINES:
        file.write_text(f"{good}\n{line}\n{good}\n", encoding="utf-8")
        run = tetrad("generate", model, *ENGINE, *GREEDY, "--input-jsonl", file)
        assert run.code == 1, line[:50]
        first, bad, last = (json.loads(line) for line in run.out.splitlines())
        assert first["outputs"][0]["text"] == last["outputs"][0]["text"] == text
        assert first["error"] is None
        assert message in bad["error"], line[:50]
        assert bad["request_id"] == "line 2"
        assert bad["outputs"] == []
        assert bad.keys() == first.keys()


def test_separators_that_are_no_line_ends(tetrad, model, tmp_path):
    """U+2028, U+0085 and the like may stand unescaped in a JSON string; such a line was once cut in two."""
    prompt = "a\u2028b\u2029c\x85d"
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", encoding="utf-8")
    run = tetrad("generate", model, *ENGINE, *GREEDY, "--input-jsonl", file)
    assert run.code == 0
    (line,) = run.out.rstrip("\n").split("\n")
    assert json.loads(line)["prompt"] == prompt


def test_one_refused_prompt_of_several(tetrad, model, expected):
    run = tetrad("generate", model, *ENGINE, *GREEDY, "--prompt", "", "--prompt", "b")
    assert run.code == 1
    assert "tetrad: error: prompt 0: the prompt is empty" in run.err
    assert run.out == f"--- prompt 1, choice 0 (length)\n{expected('b').outputs[0].text}\n"


# ---- where results go ----


def test_output_file(tetrad, model, tmp_path):
    """Only the results are in it, it has the permissions of any new file, and nothing else is left beside it."""
    target = tmp_path / "out.json"
    run = tetrad("generate", model, *ENGINE, *GREEDY, "--json", "--prompt", PROMPT, "--output", target)
    assert run.code == 0
    assert run.out == ""
    assert json.loads(target.read_text(encoding="utf-8"))["prompt"] == PROMPT
    assert list(tmp_path.iterdir()) == [target]
    other = tmp_path / "other"
    other.touch()
    assert target.stat().st_mode == other.stat().st_mode


def test_an_output_file_appears_whole_or_not_at_all(tetrad, model, tmp_path, monkeypatch):
    """An error or an interrupt in the middle leaves the old file as it was, and no half one."""
    target = tmp_path / "out.txt"
    target.write_text("old")
    arguments = ("generate", model, *ENGINE, *GREEDY, "--prompt", "x", "--output", target)

    def interrupted(self: LLMEngine, **_options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    run = tetrad(*arguments)
    assert run.code == 130
    assert "interrupted" in run.err
    monkeypatch.undo()
    assert tetrad(*arguments, "--max-model-len", 99999).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]
    assert target.read_text() == "old"


def test_a_wrong_output_file_is_known_before_the_work(tetrad, model, tmp_path, monkeypatch):
    """It was once found out after the last token, when hours of results were thrown away."""

    def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise AssertionError("the engine was built")

    monkeypatch.setattr(generate, "LLMEngine", refuse)
    for target, reason in ((tmp_path / "no" / "out", "No such file or directory"), (tmp_path, "Is a directory")):
        run = tetrad("generate", model, *ENGINE, "--prompt", "x", "--output", target)
        assert run.code == 2
        assert f"cannot write {target}: {reason}; give --output another file" in run.err


def test_output_through_a_link(tetrad, model, tmp_path):
    """The file behind the link is replaced, the link stays."""
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder" / "file")
    assert tetrad("generate", model, *ENGINE, *GREEDY, "--prompt", "x", "--output", link).code == 0
    assert link.is_symlink()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
def test_output_to_a_pipe(tetrad, model, expected):
    """What is no ordinary file is written to, not replaced: replacing once removed the device."""
    reader, writer = os.pipe()
    try:
        run = tetrad("generate", model, *ENGINE, *GREEDY, "--prompt", "x", "--output", f"/dev/fd/{writer}")
        assert run.code == 0
        assert os.read(reader, 10_000).decode() == expected("x").outputs[0].text + "\n"
    finally:
        os.close(reader)
        os.close(writer)


def test_output_dash_is_standard_output(tetrad, model, expected):
    run = tetrad("generate", model, *ENGINE, *GREEDY, "--prompt", "x", "--output", "-")
    assert run.out == expected("x").outputs[0].text + "\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_the_characters(model, monkeypatch, encoding):
    """Characters that it has no code for are escaped; they once ended the command after all the work."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    assert main(["generate", str(model), *ENGINE, *GREEDY, "--json", "--prompt", "漢ö😀"]) == 0
    assert json.loads(raw.getvalue().decode(encoding))["prompt"] == "漢ö😀"
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    bias = json.dumps({FIRST_BYTE + 0xE4: 100})  # one byte that makes no character: U+FFFD
    assert main(["generate", str(model), *ENGINE, *GREEDY, "--prompt", "x", "--logit-bias", bias]) == 0
    assert raw.getvalue().decode(encoding).startswith("\\ufffd")


# ---- what is refused as a whole ----


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--prompt", "a", "--prompt-token-ids", "5"), 2, "give only one of --prompt, --prompt-file"),
        (("--prompt-file", "a", "--input-jsonl", "b"), 2, "give only one of"),
        (("--prompt-file", "/nowhere"), 2, "cannot read /nowhere: No such file or directory\n"),
        (("--input-jsonl", "/"), 2, "cannot read /: Is a directory\n"),
        (("--prompt-token-ids", "5,x"), 2, "argument --prompt-token-ids: not token ids, as in 5,17,3: '5,x'"),
        (("--prompt-token-ids", ""), 1, "the prompt is empty"),
        (
            ("--stop-token-ids", "1.5", "--prompt", "a"),
            2,
            "--stop-token-ids: not token ids, as in 5,17,3: '1.5'",
        ),
        (("--temperature", "3", "--prompt", "a"), 2, "temperature=3.0 is not allowed"),
        (("--temperature", "hot", "--prompt", "a"), 2, "argument --temperature: invalid float value: 'hot'"),
        (("--logit-bias", "[]", "--prompt", "a"), 2, "argument --logit-bias: not a JSON object: []"),
        (("--max-model-len", "9k", "--prompt", "a"), 2, "max_model_len 9000 is above the model's"),
        (("--prompt-file", os.devnull), 2, f"there is no prompt in {os.devnull}; give --prompt"),
        (("--input-jsonl", os.devnull), 2, f"there is no prompt in {os.devnull}; give --prompt"),
        ((), 2, "there is no prompt; give --prompt, --prompt-file, --input-jsonl, or text on standard input"),
    ],
    ids=str,
)
def test_refused(tetrad, model, arguments, code, message):
    """With a message that names the flag, the exit code of its kind, and no result."""
    run = tetrad("generate", model, *ENGINE, *arguments)
    assert (run.code, run.out) == (code, "")
    assert message in run.err


def test_a_prompt_file_that_is_not_utf8(tetrad, model, tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(b"caf\xe9")
    run = tetrad("generate", model, *ENGINE, "--prompt-file", file)
    assert run.code == 2
    assert f"cannot read {file}: 'utf-8' codec can't decode byte 0xe9" in run.err


def test_a_text_prompt_without_a_tokenizer(tetrad, ids_model):
    run = tetrad("generate", ids_model, *ENGINE, "--prompt", "text")
    assert run.code == 1
    assert "text prompts need a tokenizer" in run.err


def test_a_model_that_is_not_there(tetrad, tmp_path):
    run = tetrad("generate", tmp_path / "none", "--prompt", "x")
    assert run.code == 2
    assert run.err.startswith("tetrad: error: cannot read the model configuration")


def test_weights_that_are_not_there(tetrad, model):
    run = tetrad("generate", model, "--device", "cpu", "--max-num-seqs", 2, "--prompt", "x")
    assert run.code == 1
    assert "random weights need --load-format dummy" in run.err

"""Flags: both spellings, every option of the engine, and a useful answer to a wrong one."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
from typing import Any

import pytest

from tetrad import EngineArgs, __version__
from tetrad.cli.flags import Parser, add_engine_flags, engine_args
from tetrad.cli.main import build_parser


def parse(*arguments: str) -> EngineArgs:
    parser = Parser(prog="tetrad")
    add_engine_flags(parser)
    return engine_args(parser, parser.parse_args(list(arguments)))


VALUES: dict[str, tuple[str, Any]] = {
    "tokenizer": ("some_folder", "some_folder"),
    "generation_config": ("none", "none"),
    "device": ("cuda:1", "cuda:1"),
    "cpu_threads": ("2", "2"),
    "dtype": ("bf16", "bf16"),
    "kv_cache_dtype": ("fp8", "fp8"),
    "index_cache_dtype": ("mxfp4", "mxfp4"),
    "linear_activation_quant": ("fp8", "fp8"),
    "load_format": ("dummy", "dummy"),
    "hf_overrides": ('{"index_topk": 5}', {"index_topk": 5}),
    "block_size": ("128", 128),
    "max_model_len": ("128K", "128K"),
    "max_num_batched_tokens": ("16k", "16k"),
    "max_num_seqs": ("3", 3),
    "kv_cache_memory_gb": ("1.5", 1.5),
    "gpu_memory_utilization": ("0.5", 0.5),
    "num_gpu_blocks_override": ("7", 7),
    "indexer_logits_budget_mb": ("0", 0),
    "seed": ("-4", -4),
}


def test_every_option_has_a_flag_in_both_spellings():
    """A new field of EngineArgs without a line here fails."""
    switches = {field.name for field in dataclasses.fields(EngineArgs) if isinstance(field.default, bool)}
    assert {field.name for field in dataclasses.fields(EngineArgs)} == {"model", *VALUES, *switches}
    for name, (text, value) in VALUES.items():
        for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
            assert parse("m", flag, text) == EngineArgs(model="m", **{name: value})
            assert parse("m", f"{flag}={text}") == EngineArgs(model="m", **{name: value})
    for name in switches:
        default = EngineArgs.__dataclass_fields__[name].default
        for spelling in (name, name.replace("_", "-")):
            assert parse("m", f"--{spelling}") == EngineArgs(model="m", **{name: True})
            if default:
                no = spelling if "_" not in spelling else f"_{spelling}"
                assert parse("m", f"--no{'' if no[0] == '_' else '-'}{no}") == EngineArgs(model="m", **{name: False})


def test_defaults_are_those_of_the_engine():
    """A default of the command line's own would drift away from the library's."""
    assert parse("m") == EngineArgs(model="m")


def test_underscores_in_values_stay():
    assert parse("my_model", "--tokenizer", "a_b", "--hf_overrides={\"index_topk\": 3}") == EngineArgs(
        model="my_model", tokenizer="a_b", hf_overrides={"index_topk": 3}
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [("m",), ("--model", "m"), ("--model-path", "m"), ("--model_path=m",), ("m", "--model", "m"), ("--seed=1", "m")],
)
def test_the_model_first_or_named(arguments):
    assert parse(*arguments).model == "m"


def test_aliases():
    assert parse("m", "--load-dummy") == parse("m", "--load_dummy") == parse("m", "--load-format", "dummy")
    assert parse("m", "--enable-deepseek-v4-fp4-indexer").enable_deepseek_v4_fp4_indexer
    assert parse("m", "--tokenizer-path", "f") == parse("m", "--tokenizer", "f")
    assert parse("m", "--context-length", "1K") == parse("m", "--max_model_len", "1K")
    assert parse("m", "--page-size", "256") == parse("m", "--block-size", "256")
    assert parse("m", "--random-seed", "3") == parse("m", "--seed", "3")
    assert parse("m", "--json-model-override-args", "{}") == parse("m", "--hf-overrides", "{}")


def test_load_dummy_generates(tetrad, ids_model):
    """Random weights, and only config.json is read; the other spelling of the flag gives the same."""
    head = ("generate", ids_model, "--device", "cpu", "--max-model-len", 64, "--max-num-seqs", 1)
    tail = ("--prompt-token-ids", "5,6", "--temperature", 0)
    first = tetrad(*head, "--load-dummy", *tail)
    assert first.code == 0
    assert len(first.out.split()) >= 1
    assert tetrad(*head, "--load_format=dummy", *tail).out == first.out


WRONG = [
    # flags, what must be in the message
    (("generate", "m", "--max-token", "5"), "unknown flag --max-token; did you mean --max-tokens?"),
    (("generate", "m", "--max_token=5"), "unknown flag --max-token; did you mean --max-tokens?"),
    (("generate", "m", "--index-cache", "fp4"), "unknown flag --index-cache; did you mean --index-cache-dtype?"),
    (("generate", "m", "--enable-fp4-indexer"), "did you mean --enable-deepseek-v4-fp4-indexer?"),
    (("generate", "m", "--kv_cache_dtyp", "fp8"), "did you mean --kv-cache-dtype?"),
    (("inspect", "m", "--jsn"), "unknown flag --jsn; did you mean --json?"),
    (("inspect", "m", "--qqqqqq"), "unknown flag --qqqqqq\nsee tetrad inspect --help\n"),
    (("inspect", "m", "-j"), "unknown flag -j"),
    (
        ("--max-tokens", "5", "generate", "m"),
        "--max-tokens belongs behind the command, as in tetrad generate --max-tokens",
    ),
    (("--kv_cache_dtype=fp8", "inspect", "m"), "--kv-cache-dtype belongs behind the command"),
    (("--versio",), "unknown flag --versio; did you mean --version?"),
    (("--verbos", "generate", "m"), "unknown flag --verbos"),
    (("genrate", "m"), "unknown command tetrad genrate; did you mean generate?"),
    ((), "name one of generate, inspect, eval, bench, demo, as in tetrad generate"),
    (("eval",), "name one of recall, as in tetrad eval recall"),
    (("evaluate", "m"), "unknown command tetrad evaluate; did you mean eval?"),
    (("bench", "qqq"), "unknown command tetrad bench qqq; choose one of indexer"),
    (("serve", "m", "--port", "8000"), "unknown command tetrad serve; there is no server yet"),
    (("bench", "throughput"), "only the indexer's ops are measured yet"),
    (("generate",), "name a model: the folder of a checkpoint, first or after --model"),
    (("generate", "a", "--model", "b"), "two models were named: a and --model b"),
    (("generate", "a", "b"), "tetrad generate: error: too many arguments: b"),
    (("generate", "m", "--dtype", "fp16"), "argument --dtype: invalid choice: 'fp16' (choose from"),
    (("generate", "m", "--max-num-seqs", "many"), "argument --max-num-seqs: invalid int value: 'many'"),
    (("generate", "m", "--max-num-seqs"), "argument --max-num-seqs: expected one argument"),
    (("generate", "m", "--prompt", "-x"), "a value that begins with a dash is written as --prompt=VALUE"),
    (("generate", "m", "--prompt-token-ids", "-1,5"), "is written as --prompt-token-ids=VALUE"),
    (("generate", "m", "--context-length", "-x"), "is written as --context-length=VALUE"),
    (("generate", "m", "--output="), "argument --output: the name of a file is missing"),
    (("generate", "m", "--prompt-file", ""), "argument --prompt-file: the name of a file is missing"),
    (("generate", "m", "--input-jsonl="), "argument --input-jsonl: the name of a file is missing"),
    (("eval", "recall", "--png="), "argument --png: the name of a file is missing"),
    (("bench", "indexer", "--from-json="), "argument --from-json: the name of a file is missing"),
    (("generate", "m", "--hf-overrides", "{"), "argument --hf-overrides: not JSON"),
    (("generate", "m", "--hf-overrides", "[" * 100_000), "argument --hf-overrides: not JSON"),
    (("generate", "m", "--hf-overrides", "3"), "argument --hf-overrides: not a JSON object: 3"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:50])
def test_wrong_flags(tetrad, arguments, message):
    """Exit code 2, nothing on standard output, and the nearest flag, before or behind the command."""
    run = tetrad(*arguments)
    assert (run.code, run.out) == (2, "")
    assert message in run.err
    assert run.err.count("\n") == 2  # once the usage was in it, too: 25 lines
    assert re.fullmatch(r"see tetrad( \w+)* --help", run.err.splitlines()[-1])


def test_abbreviations_are_unknown(tetrad):
    """A prefix that is unique today is ambiguous tomorrow."""
    assert "unknown flag --max-num-s; did you mean --max-num-seqs?" in tetrad("inspect", "m", "--max-num-s", "4").err


def test_help_and_version(tetrad):
    run = tetrad("--version")
    assert (run.code, run.out) == (0, f"tetrad {__version__}\n")
    run = tetrad("--help")
    assert run.code == 0
    assert all(command in run.out for command in ("generate", "inspect", "demo"))
    run = tetrad("generate", "--help")
    assert run.code == 0
    for field in dataclasses.fields(EngineArgs):
        assert f"--{field.name.replace('_', '-')}" in run.out


def test_verbose_logs_what_the_engine_decides(tetrad, ids_model, caplog):
    arguments = ("--load-dummy", "--device=cpu", "--max-model-len=64", "--max-num-seqs=1", "--prompt-token-ids=5")
    logger = logging.getLogger("tetrad")
    try:
        tetrad("generate", ids_model, *arguments)
        assert "index cache dtype auto" not in caplog.text
        tetrad("generate", ids_model, *arguments, "--verbose")
        assert "index cache dtype auto: fp4" in caplog.text
    finally:
        logger.setLevel(logging.NOTSET)


def test_every_command_has_a_handler():
    """A command without one would end in a traceback."""
    (action,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, parser in action.choices.items():
        nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [parser] if not nested else nested[0].choices.values()
        for each in parsers:
            assert callable(each.get_default("run")), name

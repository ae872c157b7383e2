"""``tetrad generate``: continue one prompt, or a file of them."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from tetrad.cli.flags import add_engine_flags, engine_args, json_object
from tetrad.errors import ConfigError, RequestError
from tetrad.frontend.generation_config import GenerationConfig
from tetrad.frontend.llm_engine import LLMEngine
from tetrad.frontend.outputs import RequestOutput
from tetrad.frontend.sampling_params import SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INTEGERS = ("n", "max_tokens", "min_tokens", "logprobs")


def add_command(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("generate", help="continue one prompt, or a file of them")
    add_engine_flags(parser)
    source = parser.add_argument_group("prompts (standard input where none is given)")
    source.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file that holds one prompt; - is stdin")
    source.add_argument("--prompt-token-ids", metavar="IDS", help="a prompt as token ids: 5,17,3")
    source.add_argument(
        "--input-jsonl",
        type=Path,
        metavar="FILE",
        help='a prompt per line: {"prompt": TEXT or [IDS]}, with sampling parameters of its own beside it; - is stdin',
    )
    source.add_argument("--output", type=Path, metavar="FILE", help="write the results here instead of to stdout")
    source.add_argument("--json", action="store_true", help="one JSON object per prompt and line")
    source.add_argument("--verbose", action="store_true", help="log what the engine decides")
    sampling = parser.add_argument_group("sampling")
    for name in _INTEGERS:
        sampling.add_argument(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS, metavar="N")
    for name in _SAMPLING:
        kind = int if name == "top_k" else float
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS, metavar="X")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    sampling.add_argument("--stop-token-ids", metavar="IDS", help="end with one of these tokens: 5,17")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    sampling.add_argument("--logit-bias", type=json_object, metavar="JSON", help='token id to bias: {"17": -100}')
    parser.set_defaults(run=run, parser=parser)


@dataclass
class Item:
    """One prompt of the input: what to run, or why it cannot be."""

    name: str
    prompt: Any = None  # whatever the line holds; the engine checks it
    params: SamplingParams | None = None
    error: str | None = None
    output: RequestOutput | None = None


def run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Continue the prompts; 1 if any of them could not be."""
    args = engine_args(parser, parsed)
    defaults = _sampling(parsed)
    items = list(_items(parser, parsed, defaults))
    if not items:
        raise RequestError("there is no prompt; give --prompt, --prompt-file, --input-jsonl, or text on standard input")
    with _destination(parsed.output) as out:
        engine = LLMEngine(args, progress=sys.stderr.isatty())
        _describe(engine)
        start = time.monotonic()
        _serve(engine, items)
        seconds = time.monotonic() - start
        as_json = parsed.json or parsed.input_jsonl is not None
        for item in items:
            _print(out, item, as_json=as_json, several=len(items) > 1, has_text=engine.tokenizer is not None)
    done = [item.output for item in items if item.output is not None]
    read = sum(len(output.prompt_token_ids) for output in done)
    written = sum(len(choice.token_ids) for output in done for choice in output.outputs)
    print(f"{read} tokens read, {written} written in {seconds:.2f} s", file=sys.stderr)
    return int(any(item.error for item in items))


def _serve(engine: LLMEngine, items: list[Item]) -> None:
    """All prompts at once; one that is refused is noted, the others go on."""
    running: dict[str, Item] = {}
    for item in items:
        if item.error is None:
            try:
                running[engine.add_request(item.prompt, item.params)] = item
            except RequestError as error:
                item.error = str(error)
    with tqdm(total=len(running), desc="prompts", unit="prompt", disable=not sys.stderr.isatty()) as bar:
        while engine.has_unfinished_requests:
            for output in engine.step(finished_only=True):
                running[output.request_id].output = output
                running[output.request_id].error = output.error
                bar.update()


def _describe(engine: LLMEngine) -> None:
    """The resolved configuration, once, on stderr."""
    config = engine.config
    print(
        f"{config.model_path}: {config.dtype} on {config.device}, KV cache {config.kv_cache_dtype}, index cache "
        f"{config.index_cache_dtype.dtype} ({config.index_cache_dtype.reason}), up to {config.max_model_len} tokens, "
        f"{engine.runner.sizes.blocks} blocks",
        file=sys.stderr,
    )


def _sampling(parsed: argparse.Namespace) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(parsed, name) for name in (*_SAMPLING, *_INTEGERS) if hasattr(parsed, name)}
    optional = {
        "stop": parsed.stop,
        "stop_token_ids": _ids(parsed.stop_token_ids, "--stop-token-ids"),
        "logit_bias": parsed.logit_bias,
        "ignore_eos": parsed.ignore_eos or None,
    }
    given |= {name: value for name, value in optional.items() if value is not None}
    # what no flag says is as the model's generation_config.json has it
    args = engine_args(parsed.parser, parsed)
    defaults = GenerationConfig.load(args.model, args.generation_config).sampling_params
    return dataclasses.replace(defaults, **given)


def _ids(text: str | None, flag: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise RequestError(f"{flag} {text!r} is not a list of token ids; write 5,17,3") from error


def _items(parser: argparse.ArgumentParser, parsed: argparse.Namespace, defaults: SamplingParams) -> Iterator[Item]:
    ways = (parsed.prompt or None, parsed.prompt_file, parsed.prompt_token_ids, parsed.input_jsonl)
    if sum(way is not None for way in ways) > 1:
        parser.error("give only one of --prompt, --prompt-file, --prompt-token-ids and --input-jsonl")
    if parsed.input_jsonl:
        yield from _lines(_read(parsed.input_jsonl), defaults)
    elif parsed.prompt_token_ids is not None:
        yield Item("0", _ids(parsed.prompt_token_ids, "--prompt-token-ids"), defaults)
    elif parsed.prompt:
        for number, prompt in enumerate(parsed.prompt):
            yield Item(str(number), prompt, defaults)
    else:
        text = _read(parsed.prompt_file or Path("-"))
        if text:
            yield Item("0", text, defaults)


def _read(path: Path) -> str:
    try:
        if str(path) != "-":
            return path.read_text(encoding="utf-8")
        if sys.stdin.isatty():
            print("reading from the terminal; Ctrl-D ends it", file=sys.stderr)
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error


def _lines(text: str, defaults: SamplingParams) -> Iterator[Item]:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    # not splitlines: it also breaks at characters that may stand in a JSON string, such as U+2028
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        item = Item(f"line {number}")
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "prompt" not in record:
                raise RequestError('a line is a JSON object with a "prompt"')
            name = record.pop("request_id", None)
            item.name = item.name if name is None else str(name)
            item.prompt = record.pop("prompt")
            unknown = sorted(set(record) - known)
            if unknown:
                raise RequestError(f"unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")
            item.params = dataclasses.replace(defaults, **record)
        except RequestError as error:
            item.error = f"line {number}: {error}"
        except (ValueError, RecursionError) as error:  # not only JSONDecodeError: numbers may be too long, too
            item.error = f"line {number}: not JSON ({error})"
        yield item


@contextmanager
def _destination(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears only once it is whole."""
    if path is None or str(path) == "-":
        yield sys.stdout
        return
    in_place = path.exists() and not path.is_file()  # a pipe or a device cannot be replaced
    target = Path(os.path.realpath(path))
    unfinished = path if in_place else target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        out = unfinished.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give --output another file") from error
    try:
        with out:
            yield out
        if not in_place:
            unfinished.replace(target)
    except BaseException:
        if not in_place:
            unfinished.unlink(missing_ok=True)
        raise


def _print(out: TextIO, item: Item, *, as_json: bool, several: bool, has_text: bool) -> None:
    if as_json:
        output = item.output or RequestOutput(item.name, None, [], [], finished=True)
        record = output.to_dict() | {"request_id": item.name, "error": item.error}
        _print_line(out, json.dumps(record, ensure_ascii=codecs.lookup(out.encoding or "utf-8").name != "utf-8"))
        return
    if item.error is not None:
        print(f"tetrad: error: prompt {item.name}: {item.error}", file=sys.stderr)
    if item.output is None:
        return
    for choice in item.output.outputs:
        if several or len(item.output.outputs) > 1:
            _print_line(out, f"--- prompt {item.name}, choice {choice.index} ({choice.finish_reason})")
        _print_line(out, choice.text if has_text else " ".join(map(str, choice.token_ids)))


def _print_line(out: TextIO, text: str) -> None:
    """Characters that the output's encoding lacks are written as escapes."""
    encoding = out.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=out)

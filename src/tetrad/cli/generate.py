"""``tetrad generate``: continue one prompt, or a file of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tetrad import __version__, bundled
from tetrad.cli.batch import Work, serve, stream
from tetrad.cli.flags import add_engine_flags, engine_args, file_name, flag_values, token_ids
from tetrad.cli.progress import Progress
from tetrad.cli.prompts import Item, items_of_lines, text_of
from tetrad.cli.results import Text, opened, write_json
from tetrad.cli.sampling_flags import add_sampling_flags
from tetrad.cli.streams import is_terminal, name_of, read_bytes, require_output, say
from tetrad.config.args import EngineArgs
from tetrad.frontend.generation_config import GenerationConfig
from tetrad.frontend.llm_engine import LLMEngine
from tetrad.frontend.sampling_params import SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_INTEGERS = ("n", "max_tokens", "min_tokens", "logprobs")
_LONGEST_REASON = 400
"""Characters of an error that the terminal shows; the results hold all of it."""
_NO_EFFECT = frozenset(
    {
        "max_num_batched_tokens",
        "max_num_seqs",
        "enable_chunked_prefill",
        "kv_cache_memory_gb",
        "gpu_memory_utilization",
        "num_gpu_blocks_override",
        "indexer_logits_budget_mb",
        "cpu_threads",
    }
)
"""Options of the engine that change no token, so that a run may go on with others."""

_EXAMPLES = (
    'tetrad generate bundled --prompt "The code of rociwo is 6634. Q:" --temperature 0 --max-tokens 5',
    "tetrad generate MODEL --prompt-file letter.txt --index-cache-dtype fp4 --json",
    "tetrad generate MODEL --input-jsonl prompts.jsonl --output results.jsonl --max-tokens 256",
)


def add_command(commands: Any) -> None:
    """Add the subcommand."""
    text = "continue one prompt, or a file of them"
    parser = commands.add_parser("generate", help=text, description=text, examples=_EXAMPLES)
    add_engine_flags(parser)
    source = parser.add_argument_group("prompts (standard input where none is given)")
    source.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt; may be repeated (default: standard input)",
    )
    source.add_argument(
        "--prompt-file", type=file_name, metavar="FILE", help="a file that holds one prompt; - is standard input"
    )
    source.add_argument("--prompt-token-ids", type=token_ids, metavar="IDS", help="a prompt as token ids: 5,17,3")
    source.add_argument(
        "--input-jsonl",
        type=file_name,
        metavar="FILE",
        help='a prompt per line: {"prompt": TEXT or [IDS]} or {"prompt_token_ids": [IDS]}, with a request_id and '
        "sampling parameters of its own beside it; or a line of an OpenAI batch for /v1/completions, whose model is "
        "not looked at and whose result is a line of ours with its custom_id; - is stdin",
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--output",
        type=file_name,
        metavar="FILE",
        help="write the results here instead of to stdout, in the order of the prompts. Each is in FILE.partial as "
        "soon as it is done; FILE appears at the end. The same command again does what is missing in FILE.partial",
    )
    results.add_argument("--restart", action="store_true", help="throw away what is in FILE.partial and do all again")
    results.add_argument("--json", action="store_true", help="one JSON object per prompt and line")
    results.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print the text of a single prompt as it comes; the default on a terminal",
    )
    results.add_argument("--verbose", action="store_true", help="log what the engine decides")
    sampling = parser.add_argument_group("sampling")
    add_sampling_flags(sampling)
    parser.set_defaults(run=run, parser=parser)


def run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Continue the prompts; 1 if any of them could not be."""
    if parsed.output is not None and str(parsed.output) == "-":
        parsed.output = None
    if parsed.output is None:
        require_output()
        if parsed.restart:
            parser.error("--restart throws away what is kept beside --output; give --output too")
    args = engine_args(parser, parsed)
    items = list(_items(parser, parsed, _sampling(parsed), args.seed))
    if not items:
        file = parsed.input_jsonl or parsed.prompt_file or Path("-")
        where = "" if str(file) == "-" else f" in {file}"
        parser.error(
            f"there is no prompt{where}; give --prompt, --prompt-file, --input-jsonl, or text on standard input"
        )
    as_json = parsed.json or parsed.input_jsonl is not None
    if _may_stream(parser, parsed, items, as_json=as_json):
        work = Work(_build(args), 1)
        stream(work, items[0], sys.stdout)
    else:
        render = write_json if as_json else Text(several=len(items) > 1)
        settings = _settings(args)
        with opened(parsed.output, [item.key(settings) for item in items], render, restart=parsed.restart) as results:
            engine = _build(args)
            if isinstance(render, Text):
                render.has_text = engine.tokenizer is not None
            work = Work(engine, sum(not results.has(place) for place in range(len(items))))
            serve(work, items, results)
    _report(items, as_json=as_json)
    say(work.summary())
    return int(any(item.error is not None for item in items))


def _build(args: EngineArgs) -> LLMEngine:
    """The engine, and its resolved configuration once on stderr."""
    with Progress(lambda: f"loading {args.model}", rewrite=False):
        engine = LLMEngine(args, progress=is_terminal(sys.stderr))
    config = engine.config
    index = config.index_cache_dtype
    say(
        f"{bundled.name_of(config.model_path)}: {config.dtype} on {config.device}, KV cache {config.kv_cache_dtype}, "
        f"index cache {index.dtype} ({index.reason}), up to {config.max_model_len} tokens, "
        f"{engine.runner.sizes.blocks} blocks"
    )
    return engine


def _settings(args: EngineArgs) -> str:
    """What results depend on besides their prompts, as text."""
    options = {name: value for name, value in dataclasses.asdict(args).items() if name not in _NO_EFFECT}
    if Path(args.model).exists():
        options["model"] = os.path.realpath(args.model)
    return json.dumps([__version__, options], sort_keys=True, default=str)


def _may_stream(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, items: list[Item], *, as_json: bool
) -> bool:
    hindrances = {
        "several prompts": len(items) > 1,
        "--n": items[0].params.n > 1,
        "JSON": as_json,
        "--output": parsed.output is not None,
    }
    found = [name for name, there in hindrances.items() if there]
    if parsed.stream and found:
        parser.error(f"--stream prints the text of one prompt as it comes; it does not go with {', '.join(found)}")
    return not found and (is_terminal(sys.stdout) if parsed.stream is None else parsed.stream)


def _report(items: list[Item], *, as_json: bool) -> None:
    """Failures, on stderr: how many and the first where all are in the results, else each."""
    failed = [item for item in items if item.error is not None]
    if not as_json:
        for item in failed:
            say(f"tetrad: error: prompt {item.name}: {item.error}")
    elif failed:
        reason = failed[0].error or ""
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "..."
        first = "; the first" if len(failed) > 1 else ""
        say(f"tetrad: error: {len(failed)} of {len(items)} prompts failed{first}: {reason}")


@flag_values()
def _sampling(parsed: argparse.Namespace) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(parsed, name) for name in (*_SAMPLING, *_INTEGERS) if hasattr(parsed, name)}
    optional = {
        "stop": parsed.stop,
        "stop_token_ids": parsed.stop_token_ids,
        "logit_bias": parsed.logit_bias,
        "ignore_eos": parsed.ignore_eos or None,
    }
    given |= {name: value for name, value in optional.items() if value is not None}
    # what no flag says is as the model's generation_config.json has it
    args = engine_args(parsed.parser, parsed)
    defaults = GenerationConfig.load(args.model, args.generation_config).sampling_params
    return dataclasses.replace(defaults, **given)


def _items(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, defaults: SamplingParams, seed: int | None
) -> Iterator[Item]:
    ways = (parsed.prompt or None, parsed.prompt_file, parsed.prompt_token_ids, parsed.input_jsonl)
    if sum(way is not None for way in ways) > 1:
        parser.error("give only one of --prompt, --prompt-file, --prompt-token-ids and --input-jsonl")
    if parsed.input_jsonl:
        yield from items_of_lines(read_bytes(parsed.input_jsonl), defaults, seed)
    elif parsed.prompt_token_ids is not None:
        yield Item("0", parsed.prompt_token_ids, defaults)
    elif parsed.prompt:
        for number, prompt in enumerate(parsed.prompt):
            yield Item(str(number), prompt, defaults)
    else:
        path = parsed.prompt_file or Path("-")
        if text := text_of(read_bytes(path), name_of(path)):
            yield Item("0", text, defaults)

"""``tetrad inspect``: what a model is, what its caches cost, and which back end each op gets on this device."""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from collections import Counter
from typing import Any

from tetrad import bundled
from tetrad.cache.groups import format_bytes
from tetrad.cli.flags import add_engine_flags, engine_args, token_ids
from tetrad.cli.streams import is_terminal
from tetrad.config import memory
from tetrad.config.engine_config import EngineConfig
from tetrad.errors import ConfigError, check_whole
from tetrad.frontend.llm_engine import LLMEngine
from tetrad.frontend.selection_recorder import describe_selection
from tetrad.geometry import BLOCK_SIZE, IndexDtype, IndexLayout
from tetrad.models.checkpoint.sizes import weight_bytes
from tetrad.models.checkpoint.tensors import expected_tensors
from tetrad.models.config import LayerKind, ModelConfig
from tetrad.ops.backends import BACKENDS, Problem, choose_backend

_WIDTH = 100
_INDENT: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "  "}
_KINDS = {
    LayerKind.SWA: "sliding-window attention: only the latest tokens",
    LayerKind.CSA: "compressed sparse attention: the window, and chosen entries of 4 tokens each",
    LayerKind.HCA: "heavily compressed attention: the window, and all entries of many tokens each",
}

_EXAMPLES = (
    "tetrad inspect bundled",
    "tetrad inspect MODEL --device cpu --index-cache-dtype fp8",
    "tetrad inspect MODEL --max-model-len 128K --max-num-seqs 8 --json",
)


def add_command(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "inspect",
        help="show layers, parameters, memory and back ends of a model (needs only config.json)",
        description="Describe a model by its config.json alone: layers, parameters, bytes of weights and caches, how "
        "many tokens and sequences fit, and which back end each op gets. The names deepseek-v4-flash and "
        "deepseek-v4-pro are the released models' configurations, which are in this package. With --selection, "
        "continue a prompt and print which entries each CSA layer (compressed sparse attention) chose.",
        examples=_EXAMPLES,
    )
    add_engine_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    group = parser.add_argument_group(
        "selection",
        'Print JSON: {"index_topk", "tokens_per_entry", "prompt_token_ids", "text", "steps": [{"position", "token_id", '
        '"visible", "layers": {LAYER: [ENTRIES]}}], ...}. A step is a drawn token; entry j stands for the tokens 4j to '
        "4j + 3; visible is how many entries there were to choose from. Reads the weights (or --load-dummy).",
    )
    source = group.add_mutually_exclusive_group()
    source.add_argument("--selection", metavar="TEXT", help="the prompt, as text (default: none, describe the model)")
    source.add_argument(
        "--selection-token-ids", type=token_ids, metavar="IDS", help="the prompt, as ids: 5,17,3 (default: none)"
    )
    group.add_argument("--selection-tokens", type=int, metavar="N", help="tokens to draw, the likeliest (default: 1)")
    parser.set_defaults(run=run, parser=parser)


def run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Print the report."""
    args = engine_args(parser, parsed)
    prompt = parsed.selection if parsed.selection is not None else parsed.selection_token_ids
    if prompt is not None:
        count = 1 if parsed.selection_tokens is None else parsed.selection_tokens
        check_whole("--selection-tokens", count, 1, error=ConfigError)
        engine = LLMEngine(args, progress=is_terminal(sys.stderr))
        chosen = describe_selection(engine, prompt, count)
        print(json.dumps({"model": bundled.name_of(engine.config.model_path)} | chosen, indent=2))
        return 0
    if parsed.selection_tokens is not None:
        parser.error("--selection-tokens needs a prompt: --selection TEXT or --selection-token-ids IDS")
    report = describe(EngineConfig.resolve(args))
    print(json.dumps(report, indent=2) if parsed.json else _text(report))
    return 0


def describe(config: EngineConfig) -> dict[str, Any]:
    """The report as plain values."""
    model = config.model
    kinds = Counter(model.layer_kinds)
    weights = _weights(config)
    return {
        "model": bundled.name_of(config.model_path),
        "layers": {kind.value: kinds[kind] for kind in LayerKind},
        "layer_order": [kind.value for kind in model.layer_kinds],
        "hca_ratio": model.hca_ratio,
        "parameters": _parameters(model),
        "weights": weights,
        "index_topk": model.index_topk,
        "max_position_embeddings": model.max_position_embeddings,
        "device": str(config.device),
        "platform": config.platform.arch,
        "cpu_threads": str(config.cpu_threads) if config.device.type == "cpu" else None,
        "dtype": str(config.dtype).removeprefix("torch."),
        "kv_cache_dtype": config.kv_cache_dtype.value,
        "index_cache_dtype": config.index_cache_dtype.dtype,
        "index_cache_dtype_reason": config.index_cache_dtype.reason,
        "config_hash": config.compute_hash(),
        "caches": {dtype.value: _caches(config, dtype) for dtype in IndexDtype},
        "per_request": {
            "window_ring_bytes": config.cache_demand.window_bytes,
            "compressor_ring_bytes": config.cache_demand.ring_bytes,
        },
        "memory": _memory(config, weights["held_bytes"]),
        "back_ends": {op: _backend(op, config) for op in BACKENDS},
    }


def _parameters(model: ModelConfig) -> dict[str, int]:
    """Counts by where they sit; ``active`` is what one token passes through: its experts, one row of the embedding."""
    counts: Counter[str] = Counter()
    for name, spec in expected_tensors(model).items():
        size = math.prod(spec.shape)
        counts["total"] += 0 if name.endswith("tid2eid") else size
        if ".experts." in name:
            counts["routed_experts"] += size
    per_expert = counts["routed_experts"] // model.n_routed_experts
    idle = per_expert * (model.n_routed_experts - model.num_experts_per_tok)
    counts["active"] = counts["total"] - idle - (model.vocab_size - 1) * model.hidden_size
    return dict(counts)


def _weights(config: EngineConfig) -> dict[str, Any]:
    """Bytes of the weights, and why they do not fit where they do not."""
    weights, available = weight_bytes(config.model, config.dtype), memory.weight_memory(config)
    report: dict[str, Any] = {
        "held_bytes": weights.held,
        "held_routed_experts_bytes": weights.held_experts,
        "stored_bytes": weights.stored,
        "available_bytes": available,
    }
    refusal = memory.weights_refusal(config, weights, available)
    return report if refusal is None else report | {"refused": refusal}


def _memory(config: EngineConfig, weights_held: int) -> dict[str, Any]:
    """What the caches need for the lengths and numbers that were asked for, and what fits into their memory."""
    demand = config.cache_demand
    report: dict[str, Any] = {
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "cache_bytes_available": memory.cache_memory(config, weights_held),
        "window_bytes": demand.requests * demand.window_bytes,
        "step_bytes": demand.step_bytes,
        "compressor_ring_bytes": demand.requests * demand.ring_bytes,
        "block_bytes": demand.block_bytes,
        "blocks_per_sequence": demand.blocks_per_request,
        "one_sequence_bytes": demand.total_bytes(1),
        "all_sequences_bytes": demand.total_bytes(config.max_num_seqs),
    }
    try:
        sizes = config.cache_sizes(report["cache_bytes_available"])
    except ConfigError as error:
        return report | {"refused": str(error)}
    return report | {
        "blocks": sizes.blocks,
        "tokens_that_fit": sizes.blocks * BLOCK_SIZE,
        "sequences_that_fit": min(sizes.blocks // demand.blocks_per_request, config.max_num_seqs),
        "cache_bytes": config.cache_groups.total_bytes(sizes),
    }


def _caches(config: EngineConfig, dtype: IndexDtype) -> dict[str, Any]:
    """Bytes for one index dtype, or why the model cannot have it."""
    try:
        layout = IndexLayout(dtype, config.model.index_head_dim, hadamard=config.index_hadamard)
        groups = config.cache_groups_with(dtype)
    except ConfigError as error:
        return {"refused": str(error)}
    return {
        "bytes_per_index_key": layout.data_row_bytes + layout.scale_row_bytes,
        "bytes_per_token": groups.bytes_per_token | {"total": sum(groups.bytes_per_token.values())},
        "block_bytes": groups.block_bytes,
    }


def _backend(op: str, config: EngineConfig) -> dict[str, Any]:
    model = config.model
    problem = Problem(config.index_cache_dtype.dtype, model.index_head_dim, model.index_n_heads)
    choice = choose_backend(op, config.platform, problem)
    return {"name": choice.name, "reason": choice.reason, "refused": dict(choice.refusals)}


def _text(report: dict[str, Any]) -> str:
    parameters = report["parameters"]
    lines = [
        report["model"],
        f"  parameters   {parameters['total']:,} ({parameters['active']:,} active per token)",
        f"  device       {report['device']} ({report['platform']}), {report['dtype']}",
        *([f"  CPU threads  {report['cpu_threads']}"] if report["cpu_threads"] else []),
        f"  KV cache     {report['kv_cache_dtype']}",
        f"  index cache  {report['index_cache_dtype']}: {report['index_cache_dtype_reason']}",
        f"  index top-k  {report['index_topk']} entries",
        f"  config hash  {report['config_hash'][:16]}",
        "",
        "layers",
    ]
    for kind, text in _KINDS.items():
        if report["layers"][kind.value]:
            lines.append(f"  {report['layers'][kind.value]:4d} {kind.value.upper()}  {text}")
    lines += ["", "bytes per token of context, all layers, by index dtype"]
    lines.append(f"  {'dtype':8}{'per key':>10}{'index':>12}{'CSA':>12}{'HCA':>12}{'total':>12}")
    for dtype, cache in report["caches"].items():
        if "refused" in cache:
            lines.append(f"  {dtype:8}{cache['refused']}")
            continue
        token = cache["bytes_per_token"]
        values = "".join(f"{token.get(name, 0.0):12.1f}" for name in ("index", "csa", "hca", "total"))
        lines.append(f"  {dtype:8}{cache['bytes_per_index_key']:>10}{values}")
    request = report["per_request"]
    lines.append(
        f"  and per request {format_bytes(request['window_ring_bytes'])} of window rings and "
        f"{format_bytes(request['compressor_ring_bytes'])} of compressor rings"
    )
    lines += ["", *_weights_text(report), "", *_memory_text(report)]
    lines += ["", "back ends on this device"]
    for op, choice in report["back_ends"].items():
        lines.append(f"  {op:18}{choice['name']}: {choice['reason']}")
        lines += [f"  {'':18}not {name}: {reason}" for name, reason in choice["refused"].items()]
    return "\n".join(lines)


def _weights_text(report: dict[str, Any]) -> list[str]:
    weights = report["weights"]
    available = weights["available_bytes"]
    lines = [
        "weights",
        f"  held         {format_bytes(weights['held_bytes'])} in {report['dtype']}, "
        f"{format_bytes(weights['held_routed_experts_bytes'])} of it routed experts",
        f"  as stored    {format_bytes(weights['stored_bytes'])}",
        f"  available    {'unknown' if available is None else format_bytes(available)} on {report['device']}",
    ]
    if "refused" in weights:
        lines += textwrap.wrap(f"not on this device: {weights['refused']}", _WIDTH, **_INDENT)
    return lines


def _memory_text(report: dict[str, Any]) -> list[str]:
    caches, count = report["memory"], report["memory"]["max_num_seqs"]
    sequence = caches["blocks_per_sequence"] * caches["block_bytes"]
    lines = [
        f"caches for max_model_len {caches['max_model_len']:,}, max_num_seqs {count:,}, "
        f"max_num_batched_tokens {caches['max_num_batched_tokens']:,}",
        f"  always       {format_bytes(caches['window_bytes'])} of window rings, "
        f"{format_bytes(caches['compressor_ring_bytes'])} of compressor rings, "
        f"{format_bytes(caches['step_bytes'])} for a step's rows",
        f"  a sequence   {caches['blocks_per_sequence']:,} blocks of 256 tokens x "
        f"{format_bytes(caches['block_bytes'])} = {format_bytes(sequence)}",
        f"  needed       {format_bytes(caches['one_sequence_bytes'])} for one sequence, "
        f"{format_bytes(caches['all_sequences_bytes'])} for all {count:,}",
        f"  available    {format_bytes(caches['cache_bytes_available'])} (--kv-cache-memory-gb)",
    ]
    if "refused" in caches:
        return lines + textwrap.wrap(caches["refused"], _WIDTH, **_INDENT)
    total = report["weights"]["held_bytes"] + caches["cache_bytes"]
    return [
        *lines,
        f"  fits         {caches['tokens_that_fit']:,} tokens, or {caches['sequences_that_fit']:,} sequences of "
        f"max_model_len, in {format_bytes(caches['cache_bytes'])}",
        f"  with weights {format_bytes(total)}",
    ]

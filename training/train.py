"""Trains the small DeepSeek-V4 that recalls facts from long documents.

    python train.py --recipe full --muon --graphs --workers 10 --out LEG1 --stop 4900
    python train.py --recipe full --muon --graphs --workers 10 --out LEG2 --state LEG1/state.safetensors

The data depend on the seed and the step alone, so a run in legs reads what one run reads. A leg ends with
`state.safetensors` of at most 16 MiB: everything, if it fits (a leg then continues exactly); otherwise the weights in
bf16 and the experts in FP8, without the optimiser's moments (a leg then warms up again).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from data import Batch, Batches, Stage
from evaluate import recall, table
from model import Model, Pass, Shape
from optimise import make_optimisers, set_rates
from quantise import fp4_groups, fp8_tiles
from safetensors.torch import load_file, save_file
from state import load_state, save_state
from torch.utils.data import DataLoader

TINY = Shape(
    hidden_size=64, compress_ratios=(0, 4, 128, 0), num_attention_heads=2, head_dim=64, qk_rope_head_dim=16,
    q_lora_rank=32, o_groups=1, o_lora_rank=32, index_n_heads=32, index_head_dim=32, index_topk=16,
    moe_intermediate_size=32, n_routed_experts=4, num_hash_layers=1,
)  # fmt: skip

RECIPES: dict[str, tuple[Shape, list[Stage]]] = {
    "tiny": (
        TINY,
        [
            Stage(30, (256,), tokens=1024, rows=32),
            Stage(20, (256, 512), selection=True, quantised=True, gaps=0.5, tokens=1024, rows=32),
        ],
    ),
    "cpu": (
        TINY,
        [
            Stage(2400, (256,), tokens=2048, rows=128),
            Stage(400, (256, 512), tokens=2048, rows=128),
            Stage(800, (512, 1024), selection=True, quantised=True, gaps=0.3, tokens=2048, rows=128),
        ],
    ),
    "probe": (
        Shape(),
        [
            Stage(500, (256,)),
            Stage(500, (512, 1024)),
            Stage(500, (1024, 2048), selection=True, gaps=0.3),
        ],
    ),
    "short": (
        Shape(),
        [
            Stage(100, (256,), varied=0.5),
            Stage(125, (512, 1024), varied=0.5),
            Stage(125, (1024, 2048), selection=True, gaps=0.3, varied=0.5),
            Stage(250, (2048, 4096, 8192), selection=True, quantised=True, gaps=0.5, varied=0.5),
        ],
    ),
    "full": (
        Shape(),
        [  # The first leg ends at step 4900; the last stage is a leg of its own.
            Stage(400, (256,)),
            Stage(500, (512, 1024)),
            Stage(600, (1024, 2048), selection=True, gaps=0.3),
            Stage(1200, (1024, 2048, 4096, 8192), selection=True, gaps=0.5),
            Stage(2200, (512, 2048, 4096, 8192, 16384, 32768), selection=True, quantised=True, gaps=0.5),
            Stage(
                2000,
                (256, 1024, 2048, 8192, 16384, 32768),
                selection=True,
                quantised=True,
                gaps=0.5,
                varied=0.6,
                density=4.0,
                peak=0.35,
            ),
        ],
    ),
}


def scaled(stages: list[Stage], factor: float) -> list[Stage]:
    """The same stages with `factor` times the steps."""
    return [replace(stage, steps=max(1, round(stage.steps * factor))) for stage in stages]


def rate_factor(stages: list[Stage], step: int, resumed: int, decay: float) -> float:
    """The share of the base rate at `step`. Each cycle of stages warms up, stays flat and falls linearly to 2 %; a leg
    without moments, `resumed` at that step, warms up too."""
    begin = end = 0
    peak = 1.0
    for stage in stages:
        if stage.peak is not None and end <= step:
            begin, peak = end, stage.peak
        elif stage.peak is not None:
            break
        end += stage.steps
    length = end - begin
    warm = (step - begin + 1) / min(100, length / 10)
    if resumed:
        warm = min(warm, (step - resumed + 1) / 30)
    return peak * min(1.0, warm) * min(1.0, max(0.02, (end - step) / max(1, decay * length)))


def losses(model: Model, batch: Batch, run: Pass) -> dict[str, torch.Tensor]:
    """Cross-entropy on answers and elsewhere, share of answer tokens right, and the indexers' divergence."""
    logits = model(batch.tokens, run, batch.positions)[:, :-1]
    target, answer = batch.tokens[:, 1:], batch.answer[:, :-1].float()
    cross = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(answer)
    count = answer.sum()
    right = (logits.argmax(-1) == target).float()
    index = torch.stack(run.index_losses).mean() if run.index_losses else cross.new_zeros(())
    return {
        "answer": (cross * answer).sum() / count,
        "other": (cross * (1 - answer)).mean(),
        "right": (right * answer).sum() / count,
        "index": index,
    }


def train_step(model: Model, optimisers, batch: Batch, stage: Stage, options) -> torch.Tensor:
    """One update at the rates that are set; returns the losses as one tensor, still on the device."""
    run = Pass(
        selection=stage.selection,
        topk=model.shape.index_topk,
        weights_quantised=stage.quantised,
        cache_quantised=stage.quantised,
        rows=batch.rows,
    )
    found = losses(model, batch, run)
    total = found["answer"] + options.other * found["other"] + options.index * found["index"]
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    rate, base = optimisers[0].param_groups[0]["lr"], optimisers[0].param_groups[0]["base"]
    with torch.no_grad():
        # Loss-free balancing: experts that got more than their share become a little less likely.
        layers = model.each_layer()
        for layer, load in run.loads.items():
            gate = layers[layer].ffn.gate
            gate.bias += torch.sign(load.mean() - load) * (options.balance / base * rate)
    return torch.stack([*(value.detach() for value in found.values()), norm])


class Stepper:
    """Runs `train_step`; on a GPU as one CUDA graph per kind of step, since launching takes longer than computing."""

    EAGER = 2
    """Steps of a kind that run (and count) before it is captured."""

    def __init__(self, model: Model, optimisers, options) -> None:
        self.arguments = (model, optimisers)
        self.options = options
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Batch, torch.Tensor]] = {}
        self.seen: dict[tuple, int] = {}
        self.pool = torch.cuda.graph_pool_handle() if options.graphs else None

    def __call__(self, batch: Batch, stage: Stage) -> torch.Tensor:
        if not self.options.graphs:
            return train_step(*self.arguments, batch, stage, self.options)
        key = (batch.tokens.shape, batch.rows.shape, stage.selection, stage.quantised)
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] <= self.EAGER:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                stats = train_step(*self.arguments, batch, stage, self.options)
            torch.cuda.current_stream().wait_stream(side)
            return stats
        if key not in self.graphs:
            fixed = Batch(*(part.clone() for part in vars(batch).values()))
            graph = torch.cuda.CUDAGraph()
            # The loader's thread may pin memory meanwhile, hence thread_local.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                stats = train_step(*self.arguments, fixed, stage, self.options)
            self.graphs[key] = (graph, fixed, stats)
        graph, fixed, stats = self.graphs[key]
        for name, part in vars(fixed).items():
            part.copy_(getattr(batch, name), non_blocking=True)
        graph.replay()
        return stats.clone()


def save_final(model: Model, folder: Path, quantised: bool) -> None:
    """`model.safetensors` under native names: rounded as the checkpoint stores them and written in bf16 where that is
    exact (FP8 and FP4 values are), fp32 for what the checkpoint keeps in fp32; and `config.json`."""
    keep = ("hc_", "ape", "attn_sink", "gate.bias")
    state = {}
    for name, value in model.native_state().items():
        if name.endswith("tid2eid"):
            state[name] = value.to(torch.int32)
            continue
        if quantised and ".experts." in name:
            value = fp4_groups(value)
        elif quantised and any(
            part in name for part in (".attn.wq", ".attn.wkv", ".attn.wo", "indexer.wq_b", "shared_experts.")
        ):
            value = fp8_tiles(value)
        state[name] = value if any(part in name for part in keep) else value.to(torch.bfloat16)
    small = {k: v.to(torch.float8_e4m3fn) if ".experts." in k and quantised else v for k, v in state.items()}
    # FP4 values with their scales do not fit E4M3's range in general, so experts go as scaled E4M3 plus exponents.
    for name, value in state.items():
        if quantised and ".experts." in name:
            groups = value.float().unflatten(-1, (-1, 32))
            exponent = torch.frexp(groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100))[1]
            small[name] = torch.ldexp(groups, -exponent).flatten(-2).to(torch.float8_e4m3fn)
            small[name + ".exponent"] = exponent.squeeze(-1).to(torch.int8)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(small, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.shape.to_config(), indent=2) + "\n")


def load_final(path: Path) -> dict[str, torch.Tensor]:
    """What `save_final` wrote, in fp32 (tid2eid int64), under native names."""
    raw = load_file(path)
    state = {}
    for name, value in raw.items():
        if name.endswith(".exponent"):
            continue
        if name + ".exponent" in raw:
            exponent = raw[name + ".exponent"].int().unsqueeze(-1)
            state[name] = torch.ldexp(value.float().unflatten(-1, (-1, 32)), exponent).flatten(-2)
        else:
            state[name] = value.long() if name.endswith("tid2eid") else value.float()
    return state


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="full", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="continue from this leg's state")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stop", type=int, help="end this leg before this step")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end this leg after so long")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every stage's steps")
    parser.add_argument("--tokens", type=int, help="tokens per step, whatever the stage says")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--decay", type=float, default=0.4, help="the share of the steps over which the rate falls")
    parser.add_argument("--muon", action="store_true")
    parser.add_argument("--other", type=float, default=0.05, help="weight of the loss outside answers")
    parser.add_argument("--index", type=float, default=0.3, help="weight of the indexers' loss")
    parser.add_argument("--balance", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graphs", action="store_true", help="capture the steps as CUDA graphs")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--every", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--evaluate", default="", help="after the leg: length:questions:format[:topk[:facts]],...")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Model:
    shape, stages = RECIPES[options.recipe]
    stages = scaled(stages, options.scale)
    if options.tokens:
        stages = [replace(stage, tokens=options.tokens) for stage in stages]
    batches = Batches(stages, options.seed)
    total = len(batches)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = Model(shape, options.seed, dtype).to(options.device)
    optimisers = make_optimisers(model, options.rate, options.weight_decay, options.muon)
    step, resumed = 0, 0
    if options.state:
        step, exact = load_state(options.state, model, optimisers)
        resumed = 0 if exact else step
    stepper = Stepper(model, optimisers, options)
    stop = min(total, options.stop or total)
    options.out.mkdir(parents=True, exist_ok=True)
    log = (options.out / "log.jsonl").open("a")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, steps {step} to {stop} of {total}")
    loader = iter(
        DataLoader(batches, batch_size=None, sampler=range(step, stop), num_workers=options.workers,
                   pin_memory=options.device == "cuda", prefetch_factor=8 if options.workers else None)
    )  # fmt: skip
    begun = mark = time.perf_counter()
    sums, since = torch.zeros(5, device=options.device), 0
    while step < stop and time.perf_counter() - begun < options.seconds:
        batch = next(loader).to(options.device)
        stage = batches.stage_of[step]
        set_rates(optimisers, rate_factor(stages, step, resumed, options.decay))
        sums += stepper(batch, stage)
        step, since = step + 1, since + 1
        if step % options.every == 0 or step == stop:
            answer, other, right, index, norm = (sums / since).tolist()
            now = time.perf_counter()
            line = {
                "step": step, "lengths": stage.lengths, "answer": round(answer, 4), "other": round(other, 4),
                "right": round(right, 4), "index": round(index, 4), "norm": round(norm, 3),
                "ms": round(1000 * (now - mark) / since, 1), "seconds": round(now - begun, 1),
            }  # fmt: skip
            log.write(json.dumps(line) + "\n")
            log.flush()
            print(json.dumps(line), flush=True)
            mark, since = now, 0
            sums.zero_()
    del loader
    kind = save_state(options.out / "state.safetensors", model, optimisers, step)
    print(f"state after step {step}: {kind}, {time.perf_counter() - begun:.1f} s")
    quantised = batches.stage_of[max(0, step - 1)].quantised
    save_final(model, options.out, quantised)
    for item in filter(None, options.evaluate.split(",")):
        length, count, index_format, *rest = item.split(":")
        topk, facts = (int(value) if value else None for value in (*rest, "", "")[:2])
        mark = time.perf_counter()
        outcomes = recall(
            model, int(length), int(count), index_format="bf16" if index_format == "dense" else index_format,
            topk=topk, facts=facts, selection=index_format != "dense", quantised=quantised,
            per_document=64 if int(length) >= 16384 else 32,
        )  # fmt: skip
        print(f"recall {item}: {table(outcomes)}  ({time.perf_counter() - mark:.1f} s)", flush=True)
        rows = [[o.kind, round(o.depth, 4), int(o.right)] for o in outcomes]
        with (options.out / "recall.jsonl").open("a") as file:
            file.write(json.dumps({"item": item, "step": step, "outcomes": rows}) + "\n")
    return model


if __name__ == "__main__":
    run(parse())

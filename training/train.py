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
from evaluate import check_room, recall, table
from model import Model, Pass
from optimise import make_optimisers, set_rates
from options import Evaluation, parse
from quantise import fp4_groups, fp8_tiles
from recipes import RECIPES
from safetensors.torch import load_file, save_file
from shape import Shape
from state import load_state, save_state
from torch.utils.data import DataLoader


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


def per_document(asked: Evaluation) -> int:
    """Questions about one document of an evaluation: as many as find room in a short one."""
    if asked.length < 2048:
        return max(1, asked.length // 256)
    return 64 if asked.length >= 16384 else 32


def check(stages: list[Stage], shape: Shape, options: argparse.Namespace) -> None:
    """Raises ValueError for what would otherwise fail in the middle of the run or after it."""
    longest, least = max(max(stage.lengths) for stage in stages), min(stage.tokens for stage in stages)
    if options.tokens and least < longest:
        raise ValueError(f"--tokens {options.tokens} is less than the recipe's longest sequence of {longest}")
    for asked in options.evaluate:
        try:
            check_room(shape, asked.length, asked.questions, facts=asked.facts, per_document=per_document(asked))
        except ValueError as error:
            raise ValueError(f"--evaluate {asked.text}: the document is too short: {error}") from error


def run(options: argparse.Namespace) -> Model:
    shape, stages = RECIPES[options.recipe]
    stages = scaled(stages, options.scale)
    if options.tokens:
        stages = [replace(stage, tokens=options.tokens) for stage in stages]
    batches = Batches(stages, options.seed)
    total = len(batches)
    check(stages, shape, options)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = Model(shape, options.seed, dtype).to(options.device)
    optimisers = make_optimisers(model, options.rate, options.weight_decay, options.muon)
    step, resumed = 0, 0
    if options.state:
        step, exact = load_state(options.state, model, optimisers)
        resumed = 0 if exact else step
        if step >= min(total, options.stop or total):
            raise ValueError(f"--state {options.state} is after step {step}; nothing is left before the leg's end")
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
    for asked in options.evaluate:
        mark = time.perf_counter()
        outcomes = recall(
            model, asked.length, asked.questions, index_format="bf16" if asked.dense else asked.index_format,
            topk=asked.topk, facts=asked.facts, selection=not asked.dense, quantised=quantised,
            per_document=per_document(asked),
        )  # fmt: skip
        print(f"recall {asked.text}: {table(outcomes)}  ({time.perf_counter() - mark:.1f} s)", flush=True)
        rows = [[o.kind, round(o.depth, 4), int(o.right)] for o in outcomes]
        with (options.out / "recall.jsonl").open("a") as file:
            file.write(json.dumps({"item": asked.text, "step": step, "outcomes": rows}) + "\n")
    return model


if __name__ == "__main__":
    try:
        run(parse())
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: error: {error}")

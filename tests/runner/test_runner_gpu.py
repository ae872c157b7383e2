"""The device's side of a step on a GPU: nothing waits for it while a step is staged, and its numbers do not depend on
how a prompt is cut. Each test has a twin on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.small import random_ids, run, small_config, small_engine, write_config
from tests.session import Session, dummy_model
from tetrad import SamplingParams
from tetrad.core.messages import Sampling
from tetrad.core.plan import NEXT, Admission, BlockDelta, Segment, StepPlan
from tetrad.models.step import Metadata
from tetrad.runner.request_table import RequestTable

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]

CHUNK = tuple(random_ids(40, 1))
DRAFTS = (7, 8, 9)


def plans() -> list[StepPlan]:
    """Two prompts, the second in two chunks; then decode rows with and without drafts, over new blocks."""
    admissions = tuple(Admission(request, 0, (), (), Sampling(), 0) for request in (2, 0))
    return [
        StepPlan(
            (Segment(2, 5, 0, CHUNK[:5], 1), Segment(0, 32, 0, CHUNK[:32], 0)),
            1,
            admissions,
            (BlockDelta(2, 0, 4), BlockDelta(0, 0, 1)),
        ),
        StepPlan((Segment(2, 1, NEXT, (), 1), Segment(0, 8, 32, CHUNK[32:], 1)), 2, (), (BlockDelta(0, 1, 3),)),
        StepPlan((Segment(2, 4, NEXT, DRAFTS, 4), Segment(0, 1, NEXT, (), 1)), 2),
        StepPlan((Segment(2, 1, NEXT, (), 1), Segment(0, 1, NEXT, (), 1)), 2, (), (), (), (), (1,)),
    ]


@contextlib.contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Whatever waits for the device raises."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tensors(metadata: Metadata) -> dict[str, Tensor]:
    """The integers among a step's metadata, without padding rows, on the host."""
    rows, found = metadata.rows, {}
    for name, part in (("window", metadata.window), ("csa", metadata.csa), ("hca", metadata.hca), ("rows", rows)):
        for field in type(part).__slots__:
            value = getattr(part, field)
            if isinstance(value, Tensor) and field not in ("block_table", "wanted"):
                found[f"{name}.{field}"] = value.cpu()
    real = rows.request.cpu() >= 0
    found = {name: value[real] for name, value in found.items()}
    return found | {"wanted": rows.wanted[rows.wanted >= 0].cpu(), "block_table": rows.block_table.cpu()}


def staged(device: str) -> list[dict[str, Tensor]]:
    """The metadata of every plan."""
    model = dummy_model(small_config()).to(device)

    def go(guard: bool) -> list[dict[str, Tensor]]:
        table = RequestTable(requests=3, max_model_len_blocks=2, step_rows=64, device=torch.device(device))
        kept = []
        for plan in plans():
            with no_waiting(device) if guard else contextlib.nullcontext():
                rows = table.apply(plan)
                metadata = model.metadata(rows)
                table.advance(rows)
            kept.append(tensors(metadata))
            table.draw([(segment.request, 11 + segment.request) for segment in plan.segments if segment.wanted])
        return kept

    go(False)  # kernels are compiled and tables made at their first use
    return go(True)


@pytest.mark.parametrize("device", DEVICES)
def test_staging_waits_for_nothing(device):
    """Once block tables were built on the host and sent whole. On a GPU applying a plan and building the metadata must
    not wait for it, and give what a CPU gives."""
    for place, (here, there) in enumerate(zip(staged(device), staged("cpu"), strict=True)):
        for name, value in there.items():
            assert torch.equal(here[name], value), f"plan {place}: {name}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("models") / "fp32")


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_give_the_tokens_of_one_prefill(device, folder):
    """In fp32, greedily. On a CPU bit by bit; on a GPU a product of another number of rows may round differently, so
    log probabilities there are only near."""
    results = []
    for budget in (512, 96):
        engine = small_engine(
            folder,
            device=device,
            dtype="float32",
            kv_cache_dtype="fp32",
            index_cache_dtype="fp32",
            max_num_batched_tokens=budget,
            num_gpu_blocks_override=8,
        )
        for number, length in enumerate((300, 131, 7)):
            params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
            engine.add_request(random_ids(length, number), params, str(number))
        results.append(run(engine))
    for name, whole in results[0].items():
        (one,), (two,) = whole.outputs, results[1][name].outputs
        assert whole.error is None
        assert one.token_ids == two.token_ids, f"request {name}: {one.logprobs} is not {two.logprobs}"
        if device == "cpu":
            assert one.logprobs == two.logprobs
        else:
            assert one.cumulative_logprob == pytest.approx(two.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position", [6, 127, 254])
def test_decode_after_rejected_drafts(device, position):
    """What rejected rows wrote, in the window and in the rings, is never read again."""
    model = dummy_model(small_config()).to(device)
    prompt, further = random_ids(position, 5), random_ids(6, 6)
    results = []
    for drafts in (False, True):
        session = Session(model, max_len=512, max_seqs=2, device=device)
        session.feed({"one": prompt})
        parts = []
        for token in further:
            if drafts:
                wrong = [2 + (token + place) % 300 for place in range(3)]
                logits, _ = session.feed({"one": [token, *wrong]}, accept={"one": 1})["one"]
            else:
                logits, _ = session.feed({"one": [token]})["one"]
            parts.append(logits[:1])
        results.append(torch.cat(parts))
    assert results[0].isfinite().all()
    if device == "cpu":
        assert torch.equal(*results)
    else:
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)

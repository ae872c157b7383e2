"""A row's arithmetic never depends on what else is in the step: hidden states are compared bit by bit.

Quantised caches throughout: one unit in the last place before a 4-bit rounding flips codes, and then tokens.
"""

from __future__ import annotations

import pytest
import torch
from tests.session import Session, dummy_model
from tests.tiny import tiny_config

from tetrad.ops.row_invariant import ROW_MULTIPLE, linear, sigmoid, silu, softplus

pytestmark = pytest.mark.slow

CASES = {
    "flash-fp32-fp4": ("flash", torch.float32, "fp8", "fp4", {}),
    "flash-bf16-fp4": ("flash", torch.bfloat16, "fp8", "fp4", {}),
    "pro-fp32-fp8": ("pro", torch.float32, "fp8", "fp8", {}),
    "pro-bf16-bf16": ("pro", torch.bfloat16, "bf16", "bf16", {}),
    "flash-real-fp32-fp4": (
        "flash",
        torch.float32,
        "fp8",
        "fp4",
        {"hca_ratio": 128, "sliding_window": 128, "index_topk": 16},
    ),
}
LENGTH = {"flash-real-fp32-fp4": 267}


@pytest.fixture
def two_threads():
    """With one thread a library splits nothing, and a product that rounds by the split of its rows looks innocent."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    kind, dtype, kv_dtype, index_dtype, overrides = CASES[request.param]
    config = tiny_config(kind, **overrides)
    model = dummy_model(config, seed=5, dtype=dtype)
    length = LENGTH.get(request.param, 137)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()

    def session(**options) -> Session:
        return Session(model, kv_dtype=kv_dtype, index_dtype=index_dtype, dtype=dtype, **options)

    return session, tokens, config


def assert_bits(streams: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.isfinite(streams.float()).all(), f"{what}: something unwritten was read"
    different = (streams != expected).flatten(1).any(1).nonzero().flatten().tolist()
    assert not different, f"{what}: rows {different[:8]} of {len(expected)} differ"


@pytest.mark.parametrize("chunks", [[1], [3], [5], [7, 9], [64], [65, 1], [129, 2]], ids=str)
def test_chunking_changes_no_bit(case, chunks):
    """A chunk of 9 rows once rounded its last row alone: matrix products were padded to 8 rows, not to multiples."""
    session, tokens, _ = case
    expected = session().run("a", tokens, [len(tokens)])[1]
    assert_bits(session(scatter=1).run("a", tokens, chunks)[1], expected, f"chunks {chunks}")


@pytest.mark.usefixtures("two_threads")
def test_batch_composition_changes_no_bit(case):
    """Alone, or mixed with prefills and decodes of others in every step, on other blocks: the same hidden states."""
    session, tokens, config = case
    expected = session().run("a", tokens, [len(tokens)])[1]
    generator = torch.Generator().manual_seed(7)
    mixed, parts, place = session(scatter=3, max_seqs=6), [], 0
    step = 0
    while place < len(tokens):
        size = (1, 13, 1, 2, 31)[step % 5]
        others = {
            f"{name}{step // 6}": torch.randint(0, config.vocab_size, (count,), generator=generator).tolist()
            for name, count in (("p", 29 if step % 6 == 0 else 1), ("q", 5))
        }
        names = [*others, "a"] if step % 2 else ["a", *others]
        new = {**others, "a": tokens[place : place + size]}
        parts.append(mixed.feed({name: new[name] for name in names})["a"][1])
        place += size
        step += 1
        if step % 6 == 0:
            for name in others:
                mixed.release(name)
    assert_bits(torch.cat(parts), expected, "mixed batch")


def test_recompute_after_preemption_changes_no_bit(case):
    """Released and computed again from nothing, over blocks full of stale entries: the same hidden states."""
    session, tokens, _ = case
    expected = session().run("a", tokens, [len(tokens)])[1]
    again = session(scatter=4, max_seqs=1)
    again.run("a", tokens[::-1], [17])
    again.release("a")
    assert_bits(again.run("a", tokens, [41, 1])[1], expected, "resumed")


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (100, 36), (128, 257), (512, 24), (40, 5), (4096, 64)], ids=str)
def test_linear_of_this_cpu(dtype, shape):
    """The property that everything rests on: padded to a multiple of 8 rows, a product rounds every row alike."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, shape[0], generator=generator).to(dtype)
    weight = torch.randn(shape[1], shape[0], generator=generator).to(dtype)
    expected = linear(x, weight)
    for start in (0, 3, 17):
        for count in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 128, 129, 257, 383):
            got = linear(x[start : start + count], weight)
            assert torch.equal(got, expected[start : start + count]), f"{count} rows from {start}: {ROW_MULTIPLE=}"


@pytest.mark.parametrize("function", [sigmoid, silu, softplus])
def test_elementwise_functions_of_this_cpu(function):
    """torch.sigmoid computes the last few elements of a tensor with another routine, which rounds differently."""
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(0)) * 4
    expected = function(x)
    for start in (0, 1, 5, 16, 777):
        for count in (1, 7, 8, 9, 31, 33, 47, 1001, 40_009):
            assert torch.equal(function(x[start : start + count].clone()), expected[start : start + count])

"""Row invariance for every shape that a configuration may have, not only for those that kernels like.

The shapes are drawn from a seed: odd heads, dimensions, ranks, groups and ratios, in both compute dtypes. One prefill,
chunks, and a batch with others give the same hidden states and logits, bit by bit.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.session import Session, dummy_model
from tests.tiny import tiny_config

from tetrad.errors import ConfigError
from tetrad.models.config import ModelConfig
from tetrad.ops.row_invariant import batched_product, linear, mean_square, middle_sum

# what once differed: heads x head_dim that is no multiple of 4 in fp32, products of at most 512 weights in bf16
NAMED = {
    "heads-3x45-fp32": (torch.float32, {"num_attention_heads": 3, "head_dim": 45, "o_groups": 1}),
    "small-products-bf16": (torch.bfloat16, {"num_attention_heads": 7, "o_groups": 7, "o_lora_rank": 5}),
    "one-of-everything-fp32": (
        torch.float32,
        {"num_attention_heads": 1, "head_dim": 3, "qk_rope_head_dim": 2, "o_groups": 1, "o_lora_rank": 1}
        | {"q_lora_rank": 1, "hidden_size": 1, "moe_intermediate_size": 1, "n_routed_experts": 1, "hc_mult": 1}
        | {"num_experts_per_tok": 1, "index_n_heads": 1, "index_head_dim": 2, "index_topk": 1, "sliding_window": 1},
    ),
}
DRAWN = range(1, 4)
LENGTH = 47


def odd_shapes(seed: int) -> dict[str, int]:
    """Small sizes that no kernel was made for. The same seed gives the same sizes."""
    draw = random.Random(seed)
    groups = draw.choice((1, 1, 2, 3, 7))
    rope = draw.choice((2, 4, 6, 10))
    experts = draw.randint(1, 7)
    return {
        "vocab_size": draw.randint(3, 90),
        "hidden_size": draw.randint(1, 75),
        "o_groups": groups,
        "num_attention_heads": groups * draw.randint(1, 3),
        "qk_rope_head_dim": rope,
        "head_dim": rope + draw.randint(1, 70),
        "q_lora_rank": draw.randint(1, 40),
        "o_lora_rank": draw.randint(1, 20),
        "sliding_window": draw.randint(1, 70),
        "index_n_heads": draw.randint(1, 20),
        "index_head_dim": draw.choice((16, 32, 64, 128)),
        "index_topk": draw.randint(1, 9),
        "moe_intermediate_size": draw.randint(1, 50),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts),
        "hc_mult": draw.randint(1, 5),
        "hca_ratio": draw.choice((2, 8, 16, 32)),
    }


def config_of(shapes: dict[str, int]) -> ModelConfig:
    """A model with all three kinds of layers in these sizes."""
    return tiny_config(
        **{"vocab_size": 61, **shapes},
        compress_ratios=(0, 4, shapes.get("hca_ratio", 16)),
        num_hidden_layers=3,
        hc_sinkhorn_iters=2,
    )


def differing_rows(config: ModelConfig, dtype: torch.dtype, kv_dtype: str, index_dtype: str) -> dict[str, list[int]]:
    """The rows whose bits depend on how the tokens come; empty where none does."""
    model = dummy_model(config, seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    tokens, other = torch.randint(0, config.vocab_size, (2, LENGTH), generator=generator).tolist()

    def session(scatter: int) -> Session:
        return Session(model, kv_dtype=kv_dtype, index_dtype=index_dtype, dtype=dtype, max_len=256, scatter=scatter)

    ways = {"whole": session(0).run("a", tokens, [LENGTH])}
    ways["chunks"] = session(1).run("a", tokens, [9, 1, 7, 2, 1, 8, 3])
    mixed = session(3)
    mixed.feed({"b": other[:11]})
    parts = [mixed.feed({"b": other[at : at + 1], "a": tokens[at : at + 13]})["a"] for at in range(0, LENGTH, 13)]
    ways["batch"] = torch.cat([logits for logits, _ in parts]), torch.cat([streams for _, streams in parts])
    found = {}
    for name, (logits, streams) in ways.items():
        expected_logits, expected = ways["whole"]
        assert torch.isfinite(streams.float()).all(), f"{name}: something unwritten was read"
        different = (streams != expected).flatten(1).any(1) | (logits != expected_logits).any(1)
        if different.any():
            found[name] = different.nonzero().flatten().tolist()
    return found


def _index_dtype(shapes: dict[str, int], dtype: torch.dtype) -> str:
    """FP4 where its groups of 32 fit."""
    if shapes.get("index_head_dim", 64) % 32 == 0:
        return "fp4"
    return "bf16" if dtype is torch.bfloat16 else "fp32"


@pytest.fixture(params=[1, 2], ids="{}-threads".format)
def threads(request):
    """A library splits a product among threads, and rounds by the split."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", NAMED)
def test_shapes_that_once_differed(name):
    """Attention did not pad its products to whole cache lines, and small bf16 products changed libraries with rows.

    The second is rare with random weights; ``test_small_products`` shows it every time.
    """
    dtype, shapes = NAMED[name]
    found = differing_rows(config_of(shapes), dtype, "fp8", _index_dtype(shapes, dtype))
    assert not found, f"rows differ: {found}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", DRAWN)
def test_drawn_shapes(seed, dtype):
    """A seeded search of the space; the shapes stand in the failure's message."""
    shapes = odd_shapes(seed)
    found = differing_rows(config_of(shapes), dtype, "fp8", _index_dtype(shapes, dtype))
    assert not found, f"rows differ in {shapes}: {found}"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_products(dtype):
    """Down to a single weight, and around the 512 weights below which 8 bf16 rows went another way than 16."""
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((1, 1), (1, 9), (3, 2), (64, 3), (64, 5), (34, 2), (20, 5), (4, 127), (4, 129), (45, 11)):
        # each half of the inputs takes away what the other gives, so that what is left is how the sums were rounded
        half = torch.randn(136, -(-inputs // 2), generator=generator).bfloat16()
        other = torch.randn(outputs, -(-inputs // 2), generator=generator).bfloat16()
        x = torch.cat((half, half * 256), 1)[:, -inputs:].to(dtype)
        weight = torch.cat((other * 256, -other), 1)[:, -inputs:].to(dtype)
        expected = linear(x, weight)
        for start, count in ((0, 1), (3, 7), (1, 9), (0, 16), (2, 64), *((8 * place, 8) for place in range(17))):
            got = linear(x[start : start + count].clone(), weight)
            assert torch.equal(got, expected[start : start + count]), f"[{inputs}, {outputs}]: {count} rows"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("transposed", [False, True])
def test_batched_products(transposed):
    """An item of a batch was rounded by its alignment, which followed from its place."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((3, 45, 8), (1, 50, 16), (2, 33, 24), (7, 5, 3), (1, 1, 1), (5, 64, 33), (8, 128, 64)):
        a = torch.randn(37, rows, inner, generator=generator)
        shape = (37, columns, inner) if transposed else (37, inner, columns)
        b = torch.randn(shape, generator=generator)

        def product(part: slice, a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
            right = b[part].clone()
            return batched_product(a[part].clone(), right.mT if transposed else right)

        expected = product(slice(0, 37))
        assert torch.allclose(expected, torch.matmul(a, b.mT if transposed else b), rtol=1e-4, atol=1e-4)
        for start, count in ((0, 1), (1, 1), (3, 2), (5, 7), (1, 8), (4, 17)):
            part = slice(start, start + count)
            assert torch.equal(product(part), expected[part]), f"{rows} x {inner} x {columns}: {count} from {start}"


def test_sums_over_the_middle():
    """With 7 threads and 6 entries of 256 tokens the last columns of 37 were summed in another order than with 7."""
    x = torch.randn(7, 256, 37, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        expected = middle_sum(x)
        assert torch.allclose(expected, x.sum(1), rtol=1e-4, atol=1e-4)
        for start, count in ((0, 1), (1, 6), (0, 6), (2, 3)):
            assert torch.equal(middle_sum(x[start : start + count].clone()), expected[start : start + count])
    finally:
        torch.set_num_threads(before)


def test_more_streams_than_sums_can_bear_are_refused():
    """Sums over 33 hyper-connection streams would depend on the rows of a step where there are many threads."""
    assert config_of({"hc_mult": 32}).hc_mult == 32
    with pytest.raises(ConfigError, match="hc_mult: is 33, must be an integer from 1 to 32"):
        config_of({"hc_mult": 33})


def test_a_long_row_on_its_own():
    """From 32768 numbers on, torch's threads share the sum of a single row: logits of a single sequence."""
    x = torch.randn(9, 400_000, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = mean_square(x)
        assert all(torch.equal(mean_square(x[row : row + 1]), expected[row : row + 1]) for row in range(9))
    finally:
        torch.set_num_threads(before)

"""What a program has told torch before it uses the engine changes nothing here: no error, and not a bit.

Default dtypes and devices reach tensors that are made without one, inference mode reaches what is built in it, autocast
reaches every product. The engine says all of it itself.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tetrad
from tests.engine.small import random_ids, small_config, small_options, write_tokenizer
from tetrad import LLM, SamplingParams
from tetrad.formats import fp8, mxfp4
from tetrad.formats.hadamard import rotate
from tetrad.geometry import IndexDtype, IndexLayout, KVDtype, KVLayout, PagedKV
from tetrad.models.checkpoint.dummy import dummy_state
from tetrad.models.checkpoint.writer import write_checkpoint
from tetrad.ops import index_topk, physical_slots, quantize_index_query, write_index_keys
from tetrad.ops.compress import compress
from tetrad.ops.kv_entries import write_kv_entries
from tetrad.ops.sparse_attention import sparse_attention

Setting = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


@contextlib.contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(precision)
    try:
        yield
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


SETTINGS: dict[str, Setting] = {
    "float16": lambda: default_dtype(torch.float16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),
    "inference-mode": torch.inference_mode,
    "no-grad": torch.no_grad,
    "grad": torch.enable_grad,
    "autocast-bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast-float16": lambda: torch.autocast("cpu", torch.float16),
    "deterministic": deterministic,
    "fp32-products-in-bf16": lambda: fp32_products("medium"),
}


PROMPTS = [random_ids(count, count) for count in (37, 130, 5, 70)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with FP8 linears and FP4 experts, so that loading has to decode them."""
    path = tmp_path_factory.mktemp("settings") / "model"
    config = small_config(expert_dtype="fp4")
    write_checkpoint(path, config, dummy_state(config, 4))
    write_tokenizer(path)
    return path


def build(folder, load_format: str = "auto", dtype: str = "bf16") -> LLM:
    llm = LLM(**small_options(folder) | {"load_format": load_format, "dtype": dtype, "seed": 3})
    llm.engine.runner.pools.poison()
    return llm


def answers(llm: LLM) -> list:
    """Everything that a few requests give: greedy, sampled in every way, prompts long enough for the indexer."""
    params = [
        SamplingParams(temperature=0, max_tokens=3, logprobs=3),
        SamplingParams(max_tokens=3, seed=1, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logprobs=1),
        SamplingParams(max_tokens=3, seed=2, top_k=20, frequency_penalty=0.3, logit_bias={7: 1.5}, min_tokens=2),
        SamplingParams(max_tokens=2, seed=5, temperature=0.7, n=2),
    ]
    outputs = llm.generate(PROMPTS, params)
    return [
        (choice.token_ids, choice.text, choice.logprobs, choice.finish_reason)
        for output in outputs
        for choice in output.outputs
    ]


@pytest.fixture(scope="module")
def expected(folder):
    """A finished engine, and what it answered with torch's own settings."""
    llm = build(folder)
    return llm, answers(llm)


@pytest.mark.parametrize("name", SETTINGS)
def test_an_engine_is_built_under(name, folder, expected):
    """Raw torch errors: products of two dtypes, writes to tensors of inference mode, copies out of the meta device."""
    with SETTINGS[name]():
        llm = build(folder)
    assert answers(llm) == expected[1]


@pytest.mark.parametrize("name", SETTINGS)
def test_an_engine_generates_under(name, expected):
    """Autocast turned the fp32 products of gates and compressors into bf16 ones, default devices moved indices."""
    llm, wanted = expected
    with SETTINGS[name]():
        got = answers(llm)
    assert got == wanted
    assert answers(llm) == wanted, "what was left in the caches cannot be used without the setting"


@pytest.mark.parametrize("name", ["float64", "meta", "inference-mode"])
def test_dummy_weights_under(name, folder):
    """Random weights are drawn in fp32 on the device of the model, whatever the defaults are."""
    with SETTINGS[name]():
        llm = build(folder, load_format="dummy", dtype="fp32")
    assert answers(llm) == answers(build(folder, load_format="dummy", dtype="fp32"))


@pytest.mark.parametrize("name", ["bfloat16", "float64", "meta", "inference-mode"])
def test_a_checkpoint_is_written_under(name, folder, tmp_path):
    """The same bytes, whatever the defaults are."""
    config = small_config(expert_dtype="fp4")
    with SETTINGS[name]():
        write_checkpoint(tmp_path / "model", config, dummy_state(config, 4))
    for file in sorted(path.name for path in (tmp_path / "model").iterdir()):
        assert (tmp_path / "model" / file).read_bytes() == (folder / file).read_bytes(), file


def operands(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs of the public functions, made before any setting."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "keys": normal(300, 64).to(dtype),
        "query": normal(9, 5, 64).to(dtype),
        "weights": normal(9, 5),
        "cos": torch.cos(normal(9, 8)),
        "sin": torch.sin(normal(9, 8)),
        "table": torch.arange(5, dtype=torch.int32).view(1, 5),
        "request": torch.zeros(9, dtype=torch.int32),
        "end": torch.arange(290, 299, dtype=torch.int32),
        "slots": torch.arange(300),
        "step": normal(16, 2, 64),
        "state": normal(3, 16, 2, 64),
        "rows": torch.full((16,), 2, dtype=torch.int32),
        "position": torch.arange(21, 37),
        "first": torch.full((16,), 21),
        "sinks": normal(5),
    }


def computed(given: dict[str, torch.Tensor], index_dtype: IndexDtype) -> dict[str, torch.Tensor]:
    """What the public functions of the ops and the formats make of them."""
    layout = IndexLayout(index_dtype, 64)
    pages = given["keys"].new_zeros((5, layout.page_bytes), dtype=torch.uint8)
    write_index_keys(given["keys"], pages, given["slots"], layout)
    q, scale = quantize_index_query(given["query"], given["cos"], given["sin"], layout)
    chosen = index_topk(
        q, scale, given["weights"], pages, given["table"], given["request"], given["end"], 20, width=299
    )
    kv = KVLayout(KVDtype.FP8, 64, 48, 16)
    cache = PagedKV(given["keys"].new_zeros((5, kv.page_bytes), dtype=torch.uint8), kv)
    write_kv_entries(given["keys"], cache, given["slots"])
    slots = physical_slots(chosen, given["table"], given["request"]).long()
    codes, scales = mxfp4.quantize(given["keys"])
    tiles, tile_scales = fp8.quantize_blocks(given["keys"])
    return {
        "pages": pages,
        "chosen": chosen,
        "attention": sparse_attention(given["query"], given["sinks"], cache, slots, scale=0.125),
        "pooled": compress(
            *(given[name] for name in ("step", "state", "rows", "position", "first")), ratio=4, overlap=True
        ),
        "rotated": rotate(given["keys"]),
        "mxfp4": mxfp4.dequantize(codes, scales),
        "fp8": fp8.dequantize_blocks(tiles, tile_scales),
        "linear": fp8.fake_quantize(given["keys"]),
    }


@pytest.mark.parametrize(
    ("dtype", "index_dtype"),
    [(torch.float32, IndexDtype.FP32), (torch.bfloat16, IndexDtype.BF16), (torch.bfloat16, IndexDtype.FP4)],
    ids=str,
)
@pytest.mark.parametrize("name", SETTINGS)
def test_public_functions_under(name, dtype, index_dtype):
    """Ops compute in the dtypes that their contracts name: autocast does not lower them."""
    given = operands(dtype)
    wanted = computed(given, index_dtype)
    with SETTINGS[name]():
        got = computed(given, index_dtype)
    for what, tensor in wanted.items():
        assert got[what].dtype == tensor.dtype
        assert torch.equal(got[what], tensor), what


FACTORIES = frozenset(
    [
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "hann_window",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "range",
        "scalar_tensor",
        "tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
    ]
)
SOURCE = Path(tetrad.__file__).parent


def unsettled(tree: ast.Module) -> Iterator[str]:
    """The calls of torch's factories that leave the dtype or the device to torch's defaults.

    A parameter's device may be left open: whoever builds a module says where, with ``torch.device`` as a context.
    """
    parameters = {
        id(argument)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "nn.Parameter"
        for argument in call.args
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        module, _, name = ast.unparse(call.func).rpartition(".")
        needed = {"dtype", "device"} - ({"device"} if id(call) in parameters else set())
        missing = needed - {keyword.arg for keyword in call.keywords}
        if module == "torch" and name in FACTORIES and missing:
            yield f"line {call.lineno}: torch.{name} without {', '.join(sorted(missing))}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_tensor_says_its_dtype_and_device(path):
    """Dozens did not, so that a program's default dtype or device reached caches, buffers and indices."""
    assert not list(unsettled(ast.parse(path.read_text(encoding="utf-8"))))


def test_the_search_finds_what_it_looks_for():
    """A call without either is named, a parameter without a device is not."""
    source = "x = torch.zeros(3)\ny = nn.Parameter(torch.empty(3, dtype=d))\nz = torch.arange(3, device=x.device)"
    assert list(unsettled(ast.parse(source))) == [
        "line 1: torch.zeros without device, dtype",
        "line 3: torch.arange without dtype",
    ]

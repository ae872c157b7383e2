"""Every public function and constructor of ops, geometry and formats, with every argument made wrong in turn.

Nonsense must be refused where it comes in, by an error of our own that names what to pass. What must not happen is an
error from the inside (``KeyError: 'fp4'``, a missing attribute, torch's own), or none at all.
"""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import tetrad
from tetrad import geometry, ops
from tetrad.errors import ConfigError
from tetrad.formats import e8m0, fp8, hadamard, mxfp4
from tetrad.geometry import IndexDtype, IndexLayout, KVDtype, KVLayout, PagedKV
from tetrad.ops import backends, compress, forced_backends, index_keys, kv_entries, rotary
from tetrad.platforms import current_platform

INT32, UINT8 = torch.int32, torch.uint8
LAYOUT, KV = IndexLayout("fp4", 32), KVLayout("fp8", 64, 6, 2)
PAGES, KV_PAGES = torch.zeros((2, LAYOUT.page_bytes), dtype=UINT8), torch.zeros((2, KV.page_bytes), dtype=UINT8)
KV_CACHE = PagedKV(KV_PAGES, KV)
SLOTS, INTEGERS = torch.arange(2), torch.zeros(2, dtype=INT32)
ANGLES = {"cos": torch.ones(2, 4), "sin": torch.zeros(2, 4)}
POOLED = {"pooled": torch.ones(2, 32), "norm_weight": torch.ones(32), "eps": 1e-6, **ANGLES, "dtype": torch.float32}
SCORED = {
    "q": torch.zeros((2, 1, 16), dtype=UINT8),
    "q_scale": torch.zeros((2, 1, 1), dtype=UINT8),
    "weights": torch.ones(2, 1),
    "cache": PAGES,
    "block_tables": torch.zeros((1, 2), dtype=INT32),
    "row_request": INTEGERS,
    "visible_end": INTEGERS,
}
FP8 = torch.zeros(4, 8).to(torch.float8_e4m3fn)
ASKED = {"op": "topk_indices", "platform": current_platform("cpu"), "problem": backends.Problem()}

CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    # ops
    ops.index_topk: SCORED | {"k": 2, "width": 70, "logits_budget_bytes": 0, "plan": None, "out": None},
    ops.indexer_logits: SCORED | {"width": 70, "plan": None, "out": None},
    ops.topk_indices: {"logits": torch.ones(2, 5), "visible_end": INTEGERS, "k": 2, "out": None},
    ops.plan_indexer: {"row_request": INTEGERS, "visible_end": INTEGERS, "width": 5, "out": None},
    ops.IndexerPlan: {
        "buffer": torch.zeros((4, 4), dtype=INT32),
        "rows": 2,
        "width": 5,
        "block": 256,
        "schedule": None,
        "schedule_of": "",
    },
    ops.physical_slots: {
        "entries": torch.zeros((2, 3), dtype=INT32),
        "block_tables": torch.zeros((1, 2), dtype=INT32),
        "row_request": INTEGERS,
        "page_entries": 64,
        "out": None,
    },
    ops.quantize_index_query: {"q": torch.ones(2, 1, 32), **ANGLES, "layout": LAYOUT},
    ops.write_index_keys: {"keys": torch.ones(2, 32), "pages": PAGES, "slots": SLOTS, "layout": LAYOUT},
    ops.write_pooled_index_keys: POOLED | {"pages": PAGES, "slots": SLOTS, "layout": LAYOUT},
    ops.forced_backends: {"names": {"topk_indices": "reference"}},
    ops.checked: {},
    index_keys.index_key_vectors: POOLED,
    index_keys.read_index_keys: {"pages": PAGES, "slots": SLOTS, "layout": LAYOUT},
    kv_entries.write_kv_entries: {"values": torch.ones(2, 8), "cache": KV_CACHE, "slots": SLOTS},
    kv_entries.write_pooled_kv_entries: POOLED
    | {"pooled": torch.ones(2, 8), "norm_weight": torch.ones(8), "cache": KV_CACHE, "slots": SLOTS},
    kv_entries.copy_kv_entries: {"cache": KV_CACHE, "sources": SLOTS, "targets": SLOTS},
    kv_entries.read_kv_entries: {"cache": KV_CACHE, "slots": SLOTS, "dtype": torch.float32},
    compress.compress: {
        "step": torch.ones(2, 2, 4),
        "state": torch.ones(3, 8, 2, 4),
        "row_request": INTEGERS,
        "position": SLOTS,
        "first": SLOTS,
        "ratio": 4,
        "overlap": True,
    },
    compress.update_state: {
        "step": torch.ones(2, 2, 4),
        "state": torch.ones(3, 8, 2, 4),
        "slots": SLOTS,
        "checkpoints": torch.ones(1, 4, 2, 4),
        "checkpoint_slots": SLOTS,
    },
    rotary.apply_rotary: {"x": torch.ones(2, 32), **ANGLES, "inverse": False},
    backends.Problem: {"dtype": "fp4", "head_dim": 32, "heads": 1},
    backends.support: ASKED,
    backends.choose_backend: ASKED,
    backends.named_backend: ASKED | {"name": "reference"},
    backends.forced_backends: {"names": "reference"},
    # geometry
    IndexLayout: {"dtype": "fp4", "head_dim": 128, "hadamard": True},
    KVLayout: {"dtype": "fp8", "entries": 64, "nope_dim": 448, "rope_dim": 64, "rope_dtype": torch.bfloat16},
    geometry.ceil_div: {"numerator": 5, "denominator": 2},
    geometry.page_stride: {"layout": LAYOUT},
    geometry.element_dtype: {"layout": IndexLayout("bf16", 8)},
    geometry.check_layout: {"layout": LAYOUT},
    geometry.data_rows: {"pages": PAGES, "layout": LAYOUT},
    geometry.scale_rows: {"pages": PAGES, "layout": LAYOUT},
    geometry.entry_slots: {
        "tables": torch.zeros((1, 2), dtype=INT32),
        "request": INTEGERS,
        "entry": INTEGERS,
        "entries_per_block": 64,
    },
    geometry.split_slots: {"slots": SLOTS, "layout": LAYOUT},
    geometry.ring_slots: {"request": SLOTS, "position": SLOTS, "ring": 8},
    geometry.check_paged: {"cache": KV_CACHE},
    geometry.PagedKV: {"pages": KV_PAGES, "layout": KV},
    geometry.PagedIndex: {"pages": PAGES, "layout": LAYOUT},
    geometry.window_ring: {"window": 128},
    geometry.pooled_tokens: {"ratio": 4},
    geometry.compressor_ring: {"ratio": 4},
    geometry.blocks_for: {"tokens": 700},
    geometry.width_blocks: {"tokens": 700},
    geometry.bucket_rows: {"rows": 9, "device_type": "cpu", "chunks": False},
    geometry.check_block_size: {"block_size": 256},
    # formats
    e8m0.as_bytes: {"scales": torch.zeros(2, dtype=UINT8)},
    e8m0.decode: {"scales": torch.zeros(2, dtype=UINT8), "dtype": torch.float32},
    e8m0.reciprocal: {"scales": torch.zeros(2, dtype=UINT8)},
    e8m0.encode_ceil: {"values": torch.ones(2)},
    e8m0.product_dtype: {"dtype": torch.float32},
    fp8.quantize_groups: {"x": torch.ones(2, 8), "group": 4},
    fp8.dequantize_groups: {
        "values": FP8,
        "scales": torch.zeros((4, 2), dtype=UINT8),
        "group": 4,
        "dtype": torch.float32,
    },
    fp8.fake_quantize: {"x": torch.ones(2, 8), "group": 4},
    fp8.quantize_blocks: {"weight": torch.ones(4, 8), "block": (2, 4)},
    fp8.dequantize_blocks: {
        "values": FP8,
        "scales": torch.zeros((2, 2), dtype=UINT8),
        "block": (2, 4),
        "dtype": torch.float32,
    },
    fp8.quantize_index: {"x": torch.ones(2, 8)},
    hadamard.rotate: {"x": torch.ones(2, 8)},
    mxfp4.quantize: {"x": torch.ones(2, 32)},
    mxfp4.dequantize: {
        "packed": torch.zeros((2, 16), dtype=UINT8),
        "scales": torch.zeros((2, 1), dtype=UINT8),
        "dtype": torch.float32,
    },
    mxfp4.pack: {"codes": torch.zeros((2, 4), dtype=UINT8)},
    mxfp4.unpack: {"packed": torch.zeros((2, 4), dtype=UINT8)},
}
"""A right call of everything that is public."""

NONSENSE = (None, 3, 0, -1, True, 128.0, "fp5", object(), torch.zeros(1, 1, 1, 1, 1, dtype=torch.complex64))

SENSIBLE = {
    "plan": (None,),
    "out": (None,),
    "schedule": (None,),
    "kind": (None,),
    "k": (3,),
    "width": (3, 0),
    "logits_budget_bytes": (3, 0),
    "page_entries": (3,),
    "eps": (3, 0, -1, 128.0),
    "rows": (3, 0),
    "block": (3,),
    "schedule_of": ("fp5",),
    "hadamard": (True,),
    "overlap": (True,),
    "inverse": (True,),
    "head_dim": (3, 0),
    "heads": (3, 0),
    "entries": (3,),
    "nope_dim": (3, 0),
    "rope_dim": (3, 0),
    "numerator": (3, 0, -1),
    "denominator": (3,),
    "entries_per_block": (3,),
    "ring": (3,),
    "ratio": (3,),
    "tokens": (3, 0),
    # of the device only "cpu" matters, and of the switch only whether it is true
    "device_type": NONSENSE,
    "chunks": NONSENSE,
    "position": (3, 0),
    "window": (3,),
    "max_num_seqs": (3, 0),
    "max_num_batched_tokens": (3, 0),
    "group": (3,),
    "dtype": ("fp5",),
}
"""What of the nonsense makes sense somewhere, by argument; it may be taken and may be refused."""


def of_module(module: ModuleType) -> list[Any]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    objects = [getattr(module, name) for name in names]
    return [x for x in objects if callable(x) and getattr(x, "__module__", "").startswith(module.__name__)]


def test_nothing_public_is_left_out():
    """A new function without a line here would be free to fail as it likes."""
    modules = (ops, index_keys, kv_entries, compress, e8m0, fp8, hadamard, mxfp4, geometry)
    public = {x for module in modules for x in of_module(module)}
    assert public - set(CALLS) == {IndexDtype, KVDtype}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_the_right_call_is_taken(function):
    """Otherwise the test below would prove nothing. Every parameter is named."""
    if function is not geometry.check_layout:
        assert set(CALLS[function]) == set(inspect.signature(function).parameters)
    call(function, CALLS[function])


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_nonsense_is_refused_at_the_door(function):
    for name in CALLS[function]:
        for value in NONSENSE:
            try:
                call(function, CALLS[function] | {name: value})
            except Exception as error:
                refused_by_us(error, f"{name}={value!r}")
            else:
                known = [x for x in SENSIBLE.get(name, ()) if type(x) is type(value) and x == value]
                assert known, f"{function.__qualname__} takes {name}={value!r}"


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    made = function(**arguments)
    if hasattr(made, "__enter__"):
        with made:
            pass


def refused_by_us(error: Exception, what: str) -> None:
    """It is a TypeError or a ValueError, and the line that it comes from is a ``raise`` of the package."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{what}: {type(error).__name__}: {error} from {last.filename}:{last.lineno}"
    assert isinstance(error, (TypeError, ValueError)), where
    assert last.filename.startswith(tetrad.__path__[0]), where
    first = next(n for n in range(last.lineno or 1, 0, -1) if "raise " in linecache.getline(last.filename, n))
    assert (last.lineno or 1) - first < 6, where
    assert len(str(error)) > 20, where


# ---- the text form ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "name"),
    [
        *((name, name) for name in ("fp4", "fp8", "bf16", "fp32")),
        *((("FP4", "fp4"), ("mxfp4", "fp4"), ("bfloat16", "bf16"), ("torch.float32", "fp32"))),
        *(((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float8_e4m3fn, "fp8"))),
        (torch.float4_e2m1fn_x2, "fp4"),
    ],
)
def test_an_index_dtype_by_name(value, name):
    """``IndexLayout("fp4", 128)`` was accepted, and failed later with ``KeyError: 'fp4'``."""
    layout = IndexLayout(value, 128)
    assert layout.dtype is IndexDtype(name)
    assert layout == IndexLayout(IndexDtype(name), 128)
    assert hash(layout) == hash(IndexLayout(IndexDtype(name), 128))
    assert layout.page_bytes == {"fp4": 4352, "fp8": 8448, "bf16": 16384, "fp32": 32768}[name]


def test_a_kv_dtype_by_name():
    assert KVLayout("fp8", 64, 448, 64) == KVLayout(KVDtype.FP8, 64, 448, 64)
    assert KVLayout(torch.bfloat16, 64, 448, 64).dtype is KVDtype.BF16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IndexLayout("int4", 128), r"'int4' is no IndexDtype; choose one of 'fp4', 'fp8', 'bf16', 'fp32'"),
        (lambda: IndexLayout(None, 128), "None is no IndexDtype; choose one of 'fp4'"),
        (lambda: IndexLayout(3, 128), "3 is no IndexDtype; choose one of"),
        (lambda: IndexLayout(True, 128), "True is no IndexDtype"),
        (lambda: IndexLayout(torch.float16, 128), r"torch.float16 is no IndexDtype"),
        (lambda: KVLayout("fp4", 64, 448, 64), "'fp4' is no KVDtype; choose one of 'fp8', 'bf16', 'fp32'"),
        (lambda: IndexLayout("fp4", 0), "head_dim must be at least 1; got 0"),
        (lambda: IndexLayout("fp8", 24), "head_dim 24 is not a power of two.*hadamard=False"),
        (lambda: KVLayout("fp8", 0, 448, 64), "entries must be at least 1; got 0"),
        (lambda: KVLayout("fp8", 64, 0, 0), "nope_dim and rope_dim are both 0"),
        (lambda: KVLayout("fp8", 64, 448, 64, torch.float16), "rope_dtype must be torch.bfloat16 or torch.float32"),
        (lambda: geometry.element_dtype(LAYOUT), "a page in fp4 has data and scales"),
    ],
)
def test_what_cannot_be_a_layout(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IndexLayout("fp4", 128.0), "head_dim must be a plain int; got float"),
        (lambda: IndexLayout("fp4", "128"), "head_dim must be a plain int; got str"),
        (lambda: IndexLayout("fp4", True), "head_dim must be a plain int; got bool"),
        (lambda: IndexLayout("fp4", 128, hadamard=1), "hadamard must be True or False; got 1"),
        (lambda: ops.write_index_keys(torch.ones(2, 32), PAGES, SLOTS, "fp4"), "layout must be an IndexLayout"),
        (lambda: ops.write_index_keys(torch.ones(2, 32), PAGES, SLOTS, KV), "IndexLayout.*; got KVLayout"),
        (lambda: kv_entries.write_kv_entries(torch.ones(2, 8), KV_PAGES, SLOTS), "cache must be PagedKV.*got Tensor"),
        (lambda: PagedKV(KV_PAGES, LAYOUT), "a KVLayout.*got IndexLayout"),
        (lambda: e8m0.decode(torch.zeros(2, dtype=UINT8), "bf16"), "torch.bfloat16 or torch.float16; dtype is 'bf16'"),
        (lambda: fp8.quantize_blocks(torch.ones(4, 4), 128), r"block must be .* such as \(128, 128\); got 128"),
        (lambda: backends.choose_backend("topk_indices", "cpu", backends.Problem()), "must be a Platform.*got 'cpu'"),
        (lambda: forced_backends(None).__enter__(), "names must be back ends by op.*or the name of one.*got None"),
    ],
)
def test_what_to_pass_instead(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_back_end_by_name():
    """``forced_backends("sm90")`` ended in an AttributeError. It names every op that has such a back end."""
    case = {"logits": torch.ones(2, 5), "visible_end": INTEGERS, "k": 2}
    for names in ("reference", "triton+reference"):
        with forced_backends(names):
            forced = dict(backends._forced.get())
        assert set(forced) == set(backends.BACKENDS)
    assert forced["topk_indices"] == "triton"
    assert forced["kv_entries"] == "reference"
    with forced_backends("sm90+cuda"):
        assert dict(backends._forced.get()) == {
            "indexer_logits": "sm90",
            "plan_indexer": "sm90",
            "topk_indices": "cuda",
        }
    with forced_backends("cuda"), pytest.raises(ConfigError, match="cuda does not compute topk_indices here"):
        ops.topk_indices(**case)
    with pytest.raises(ConfigError, match="no op has a back end 'sm80'; there are sm90, triton, reference, cuda"):
        forced_backends("sm80").__enter__()

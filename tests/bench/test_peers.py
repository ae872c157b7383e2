"""Who is timed, and with which calls."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import tetrad.ops
from tests.bench import fake_deep_gemm, fake_deep_gemm_2_8
from tests.bench.test_inputs import CPU, DECODE, PREFILL, make_case
from tetrad.bench.cases import Case, Kind, Op, Shape
from tetrad.bench.correctness import Oracle
from tetrad.bench.deep_gemm import DeepGemm
from tetrad.bench.inputs import make_inputs
from tetrad.bench.peers import Own, Peer, contenders, load_peer
from tetrad.errors import ConfigError
from tetrad.geometry import IndexDtype


@pytest.fixture
def peer_module(monkeypatch):
    """An importable module that a test fills."""
    module = ModuleType("some_peer")
    monkeypatch.setitem(sys.modules, "some_peer", module)
    return module


@pytest.mark.parametrize("op", Op)
def test_own_calls_are_right(op):
    peer, inputs = Own(CPU), make_inputs(make_case(op, DECODE), 1, CPU)[0]
    call = peer.call(inputs)
    assert Oracle(inputs).fault(call()) is None
    assert peer.label(inputs.case) == "reference"


def test_a_peer_without_plans(peer_module):
    """It is given None for a plan, and its own scores go to its top-k."""
    plans = []

    def indexer_logits(*arguments, width, plan, out):
        plans.append(plan)
        # a peer may leave ``out`` alone
        return tetrad.ops.indexer_logits(*arguments, width=width)

    peer_module.indexer_logits = indexer_logits
    peer_module.topk_indices = tetrad.ops.topk_indices
    peer = load_peer("some_peer", CPU)
    for op in (Op.SCORE, Op.TOPK, Op.TOTAL):
        inputs = make_inputs(make_case(op, DECODE), 1, CPU)[0]
        assert peer.refusal(inputs.case) is None
        assert Oracle(inputs).fault(peer.call(inputs)()) is None
    assert plans == [None, None]
    assert peer.refusal(make_case(Op.PLAN, DECODE)) == "it has no plan_indexer"


def test_a_peer_with_plans_of_its_own_kind(peer_module):
    """The plan is made outside of a score, made anew at the same place in a plan or a total, and given to the score."""
    log = []

    def plan_indexer(row_request, visible_end, *, width, out=None):
        log.append(("plan", out))
        return out or object()

    def indexer_logits(*arguments, width, plan, out):
        log.append(("score", plan))
        return tetrad.ops.indexer_logits(*arguments, width=width, out=out)

    peer_module.plan_indexer, peer_module.indexer_logits = plan_indexer, indexer_logits
    peer_module.topk_indices = tetrad.ops.topk_indices
    peer = load_peer("some_peer", CPU)
    for op, wanted in ((Op.PLAN, ["plan"]), (Op.SCORE, ["score"]), (Op.TOTAL, ["plan", "score"])):
        log.clear()
        call = peer.call(make_inputs(make_case(op, DECODE), 1, CPU)[0])
        assert log == [("plan", None)]
        log.clear()
        call()
        first = {id(value) for _, value in log}
        assert [name for name, _ in log] == wanted
        assert len(first) == 1
        assert log[0][1] is not None


def test_a_peer_may_refuse(peer_module):
    peer_module.indexer_logits = peer_module.topk_indices = tetrad.ops.indexer_logits
    asked = []

    def refusal(op, dtype, heads, head_dim):
        asked.append((op, dtype, heads, head_dim))
        return "only fp8" if dtype == "fp4" else None

    peer_module.refusal = refusal
    peer = load_peer("some_peer", CPU)
    assert peer.refusal(make_case(Op.SCORE, DECODE, "fp4")) == "only fp8"
    assert peer.refusal(make_case(Op.SCORE, DECODE, "fp8")) is None
    assert peer.refusal(make_case(Op.TOPK, DECODE)) is None
    assert asked == [("score", "fp4", 5, 64), ("score", "fp8", 5, 64), ("topk", None, 5, 64)]
    assert peer.refusal(make_case(Op.TOTAL, DECODE, "fp4")) == "only fp8"


def test_own_back_ends_by_name():
    """A name that an op does not have leaves that op where it is, and out of the table."""
    reference = Own(CPU, ("reference",))
    case = make_case(Op.TOTAL, DECODE)
    assert (reference.name, reference.label(case), reference.refusal(case)) == ("reference", "reference", None)
    hopper = Own(CPU, ("sm90", "cuda"))
    assert hopper.name == "sm90+cuda"
    assert "written for sm_90, not for cpu" in (hopper.refusal(case) or "")
    assert Own(CPU, ("cuda",)).refusal(make_case(Op.PLAN, DECODE)) == "plan_indexer has no back end of that name"
    triton = Own(CPU, ("triton",))
    assert "Triton compiles for GPUs" in (triton.refusal(make_case(Op.TOPK, DECODE)) or "")
    with pytest.raises(ConfigError, match="no op has a back end 'fast'; there are"):
        Own(CPU, ("reference", "fast"))


def test_uses_are_told_once():
    cases = [make_case(op, DECODE, dtype) for dtype in ("fp4", "bf16") for op in Op]
    uses = Own(CPU).uses(cases)
    assert [(use.op, use.name, use.dtypes) for use in uses] == [
        ("plan_indexer", "reference", ()),
        ("indexer_logits", "reference", ("fp4", "bf16")),
        ("topk_indices", "reference", ()),
    ]
    assert all(use.refused for use in uses)


def test_contenders(peer_module):
    peer_module.topk_indices = tetrad.ops.topk_indices
    assert [peer.name for peer in contenders(CPU, [], [])] == ["tetrad"]
    everyone = contenders(CPU, [("reference",), ("sm90", "cuda")], ["some_peer"])
    assert [peer.name for peer in everyone] == ["reference", "sm90+cuda", "some_peer"]
    with pytest.raises(ConfigError, match="some_peer is named twice"):
        contenders(CPU, [], ["some_peer", "some_peer"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.module", "the peer no.such.module cannot be imported .*install it, or set PYTHONPATH"),
        ("", "cannot be imported"),
        ("json", "the peer json has none of plan_indexer, indexer_logits, topk_indices"),
        ("deep_gemm", "needs a GPU"),
    ],
)
def test_peers_that_are_not_there(name, message):
    with pytest.raises(ConfigError, match=message):
        load_peer(name, CPU)


def test_deep_gemm_is_not_installed(monkeypatch):
    """The error names what to install, whatever the import dies of."""
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(ConfigError, match=r"https://github\.com/deepseek-ai/DeepGEMM"):
        load_peer("deep_gemm", torch.device("cuda"))


@pytest.fixture(params=[fake_deep_gemm, fake_deep_gemm_2_8], ids=["older", "2.8"])
def deep_gemm(request, monkeypatch) -> Peer:
    """The adapter over a stand-in with the same calls, on the CPU.

    It once knew the older names only and died of release 2.8 with an AttributeError.
    """
    monkeypatch.setitem(sys.modules, "deep_gemm", request.param)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    return DeepGemm(torch.device("cuda"))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_deep_gemm_decode(deep_gemm, rows):
    """The right scores out of our pages, with our query scales, planned before the clock starts."""
    case = Case(Op.SCORE, Shape(Kind.DECODE, 3, 150, rows), IndexDtype.FP8, 5, 64, 7)
    inputs = make_inputs(case, 1, CPU)[0]
    assert deep_gemm.refusal(case) is None
    call = deep_gemm.call(inputs)
    fake_deep_gemm.calls.clear()
    assert Oracle(inputs).fault(call()) is None
    assert fake_deep_gemm.calls == ["score"]
    plan = deep_gemm.call(make_inputs(make_case(Op.PLAN, case.shape), 1, CPU)[0])
    assert plan().shape == ((66 if rows == 4 else 132) + 1, 2)


def test_deep_gemm_with_a_place_for_each_multiprocessor(monkeypatch):
    """A release whose clusters have one place in the schedule for each of their two halves."""
    monkeypatch.setitem(sys.modules, "deep_gemm", fake_deep_gemm)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    scorer = fake_deep_gemm.fp8_paged_mqa_logits

    def whole(q, cache, weights, lengths, table, plan, width, clean_logits):
        if plan.shape[0] != fake_deep_gemm.SMS + 1:
            raise RuntimeError("Assertion error (schedule_meta_size)")
        return scorer(q, cache, weights, lengths, table, plan[: fake_deep_gemm.SMS // 2 + 1], width)

    monkeypatch.setattr(fake_deep_gemm, "fp8_paged_mqa_logits", whole)
    deep_gemm = DeepGemm(torch.device("cuda"))
    inputs = make_inputs(Case(Op.SCORE, Shape(Kind.DECODE, 2, 70, 4), IndexDtype.FP8, 5, 64, 7), 1, CPU)[0]
    assert Oracle(inputs).fault(deep_gemm.call(inputs)()) is None


def test_deep_gemm_prefill(deep_gemm):
    inputs = make_inputs(make_case(Op.SCORE, PREFILL, "fp8"), 1, CPU)[0]
    call = deep_gemm.call(inputs)
    fake_deep_gemm.calls.clear()
    assert Oracle(inputs).fault(call()) is None
    assert fake_deep_gemm.calls == ["prefill"]
    assert deep_gemm.note(inputs.case).endswith("contiguous keys")


@pytest.mark.parametrize(
    ("release", "note", "seen"),
    [(fake_deep_gemm, "no early start", []), (fake_deep_gemm_2_8, "early start on", [True])],
)
@pytest.mark.parametrize("before", [False, True])
def test_early_start_of_deep_gemm(monkeypatch, release, note, seen, before):
    """Ours starts early, so it is timed with its own early start on where it has one; then it is as it was."""
    monkeypatch.setitem(sys.modules, "deep_gemm", release)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fake_deep_gemm_2_8, "_pdl", before)
    peer, inputs = DeepGemm(torch.device("cuda")), make_inputs(make_case(Op.SCORE, DECODE, "fp8"), 1, CPU)[0]
    fake_deep_gemm_2_8.early_start.clear()
    with peer.chosen():
        peer.call(inputs)()
    assert fake_deep_gemm_2_8.early_start == seen
    assert fake_deep_gemm_2_8.get_pdl() is before
    assert peer.note(inputs.case) == note


def test_new_names_with_the_old_argument(monkeypatch):
    """Releases between the two: the query as a pair, and ``clean_logits``, told by compiled code in a docstring."""
    given = []

    class Compiled:
        """fp8_fp4_paged_mqa_logits(q: tuple, ..., max_context_len: int, clean_logits: bool = False) -> torch.Tensor"""

        @property
        def __signature__(self):
            raise ValueError("compiled code has no signature")

        def __call__(self, q, *arguments, clean_logits):
            assert not clean_logits
            given.append(len(q))
            return fake_deep_gemm.fp8_paged_mqa_logits(q[0], *arguments)

    module = ModuleType("deep_gemm")
    module.__dict__.update(vars(fake_deep_gemm))
    module.fp8_fp4_paged_mqa_logits = Compiled()
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    inputs = make_inputs(make_case(Op.SCORE, DECODE, "fp8"), 1, CPU)[0]
    assert Oracle(inputs).fault(DeepGemm(torch.device("cuda")).call(inputs)()) is None
    assert given == [2]


def test_a_deep_gemm_without_an_indexer(monkeypatch):
    """The error names both names; it was an AttributeError in the middle of the measurement."""
    module = ModuleType("deep_gemm")
    module.__version__ = "1.0"
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    with pytest.raises(ConfigError, match=r"1\.0.*neither fp8_fp4_paged_mqa_logits nor fp8_paged_mqa_logits"):
        DeepGemm(torch.device("cuda"))


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "message"),
    [
        (Op.TOPK, DECODE, "fp8", "no top-k"),
        (Op.TOTAL, DECODE, "fp8", "no top-k"),
        (Op.SCORE, DECODE, "fp4", "only its FP8 kernels are adapted, not fp4"),
        (Op.SCORE, DECODE, "bf16", "only its FP8"),
        (Op.PLAN, PREFILL, "fp8", "no plan"),
    ],
)
def test_what_deep_gemm_does_not_do(deep_gemm, op, shape, dtype, message):
    assert message in (deep_gemm.refusal(make_case(op, shape, dtype)) or "")

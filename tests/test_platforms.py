"""Which dtype the index cache gets: one predicate, one decision, and what is logged about it."""

from __future__ import annotations

import logging

import pytest
import torch

from tetrad.errors import ConfigError
from tetrad.ops.backends import Problem, support
from tetrad.platforms import Platform, ResolvedIndexDtype, Support, current_platform, fp4_refusal, resolve_index_dtype

CPU = Platform("cpu", "cpu", "some processor")
OLD = Platform("cuda", "sm_70", "an old device")
SERVED = [
    Support("indexer_logits", "fast", False, "needs sm_90"),
    Support("indexer_logits", "slow", True, "runs everywhere"),
]
REFUSED = [Support("indexer_logits", "fast", False, "needs sm_90"), Support("indexer_logits", "slow", False, "no FP4")]


def resolve(requested: str, *, head_dim: int = 128, platform=CPU, offered=SERVED, strict: bool = False):
    return resolve_index_dtype(requested, index_head_dim=head_dim, platform=platform, support=offered, strict=strict)


def records(caplog) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "tetrad.platforms"]


@pytest.fixture(autouse=True)
def every_level(caplog):
    caplog.set_level(logging.DEBUG, logger="tetrad.platforms")


def test_the_refusal():
    assert fp4_refusal(128, CPU, SERVED) is None
    assert fp4_refusal(40, CPU, SERVED) == "index_head_dim 40 is not a multiple of 32, the channels of one FP4 scale"
    assert fp4_refusal(128, OLD, REFUSED) == ("no back end scores FP4 keys on sm_70 (fast: needs sm_90; slow: no FP4)")
    assert fp4_refusal(128, OLD, []) == "no back end scores FP4 keys on sm_70 (there is none at all)"


def test_auto_takes_fp4_where_it_is_served(caplog):
    assert resolve("auto") == ResolvedIndexDtype("fp4", "auto", "the slow back end supports fp4 on cpu")
    assert records(caplog) == [("INFO", "index cache dtype auto: fp4, because the slow back end supports fp4 on cpu")]


@pytest.mark.parametrize(("head_dim", "offered"), [(128, REFUSED), (40, SERVED), (128, [])])
@pytest.mark.parametrize("strict", [False, True])
def test_auto_never_fails(head_dim, offered, strict, caplog):
    """Strictness is about what was asked for, and auto asks for nothing."""
    got = resolve("auto", head_dim=head_dim, offered=offered, platform=OLD, strict=strict)
    assert (got.dtype, got.requested) == ("fp8", "auto")
    assert got.reason == fp4_refusal(head_dim, OLD, offered)
    assert [level for level, _ in records(caplog)] == ["INFO"]
    assert got.reason in records(caplog)[0][1]


@pytest.mark.parametrize("requested", ["fp4", "mxfp4"])
@pytest.mark.parametrize("strict", [False, True])
def test_fp4_as_asked(requested, strict, caplog):
    assert resolve(requested, strict=strict) == ResolvedIndexDtype("fp4", requested, "as asked for")
    assert records(caplog) == []


@pytest.mark.parametrize("requested", ["fp4", "mxfp4"])
@pytest.mark.parametrize(("head_dim", "offered"), [(128, REFUSED), (48, SERVED)])
def test_fp4_that_cannot_be_served(requested, head_dim, offered, caplog):
    """One warning with the reason, not one for every layer, and FP8."""
    got = resolve(requested, head_dim=head_dim, offered=offered, platform=OLD)
    assert (got.dtype, got.requested) == ("fp8", requested)
    assert [level for level, _ in records(caplog)] == ["WARNING"]
    assert f"{requested} cannot be served: {got.reason}; using fp8" in records(caplog)[0][1]
    with pytest.raises(ConfigError, match="--strict-index-cache-dtype") as error:
        resolve(requested, head_dim=head_dim, offered=offered, platform=OLD, strict=True)
    assert got.reason in str(error.value)


@pytest.mark.parametrize("requested", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("offered", [SERVED, REFUSED])
def test_the_others_as_asked(requested, offered, caplog):
    """An explicit choice is never changed, nor upgraded."""
    assert resolve(requested, offered=offered, head_dim=40).dtype == requested
    assert records(caplog) == []


@pytest.mark.parametrize("requested", ["fp16", "FP4", "", "int4"])
def test_unknown_dtype(requested):
    with pytest.raises(ConfigError, match="is unknown; choose one of auto, fp4, fp8, bf16, fp32, mxfp4"):
        resolve(requested)


def test_the_cpu_serves_fp4():
    """With the real registry: the reference is enough for auto to mean fp4."""
    platform = current_platform("cpu")
    real = support("indexer_logits", platform, Problem("fp4", 128, 64))
    assert resolve_index_dtype("auto", index_head_dim=128, platform=platform, support=real).dtype == "fp4"


def test_the_platform_of_a_device():
    platform = current_platform("cpu")
    assert (platform.device_type, platform.arch) == ("cpu", "cpu")
    assert platform.name
    assert current_platform(torch.device("cpu")) == platform
    assert current_platform("meta").arch == "meta"


def test_the_platform_of_a_gpu(monkeypatch):
    """NVIDIA devices are named by their compute capability, AMD's by the part before their feature flags."""

    class Properties:
        name, major, minor, gcnArchName = "a device", 9, 0, "gfx950:sramecc+:xnack-"  # noqa: N815

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    for hip, arch in ((None, "sm_90"), ("7.0", "gfx950")):
        monkeypatch.setattr(torch.version, "hip", hip)
        current_platform.cache_clear()
        assert current_platform("cuda:0") == Platform("cuda", arch, "a device")
    current_platform.cache_clear()

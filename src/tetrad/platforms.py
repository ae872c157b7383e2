"""What a device can do, and which dtype the index cache gets on it: the only place where an architecture is asked.

Back ends answer whether they support an operation, with a reason (:class:`Support`). The registry of
``tetrad.ops.backends`` asks them, this module only weighs the answers. The decision is made once, when an engine is
built.
"""

from __future__ import annotations

import functools
import logging
import platform as host
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tetrad.errors import ConfigError
from tetrad.formats import mxfp4

logger = logging.getLogger(__name__)

INDEX_DTYPES = ("fp4", "fp8", "bf16", "fp32")
"""How index keys can be stored."""

_ALIASES = {"mxfp4": "fp4"}


@dataclass(frozen=True, slots=True)
class Platform:
    """A device, as the back ends need to know it.

    ``device_type`` is torch's ("cpu", "cuda", ...; AMD devices are "cuda" too), ``arch`` the instruction set ("cpu",
    "sm_90", "gfx950"), ``name`` what the device calls itself.
    """

    device_type: str
    arch: str
    name: str


@dataclass(frozen=True, slots=True)
class Support:
    """A back end's answer to "can you compute this here?". ``reason`` says why not, or what speaks for it."""

    op: str
    name: str
    supported: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ResolvedIndexDtype:
    """The index cache's dtype (one of ``INDEX_DTYPES``), what was asked for, and why it became what it is."""

    dtype: str
    requested: str
    reason: str


@functools.cache
def current_platform(device: torch.device | str) -> Platform:
    """The platform of a device; asks the driver once per device and process."""
    device = torch.device(device)
    if device.type == "cpu":
        return Platform("cpu", "cpu", host.processor() or host.machine())
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            # "gfx942:sramecc+:xnack-": only what stands before the colon is the instruction set
            return Platform("cuda", properties.gcnArchName.split(":")[0], properties.name)
        return Platform("cuda", f"sm_{properties.major}{properties.minor}", properties.name)
    return Platform(device.type, device.type, device.type)


def fp4_refusal(index_head_dim: int, platform: Platform, support: Sequence[Support]) -> str | None:
    """Why this platform cannot keep index keys in FP4, or None if it can. The one predicate behind every such branch.

    Args:
        support: what every back end of the scorer answers for FP4 keys of this head dimension on this platform
    """
    if index_head_dim % mxfp4.GROUP_SIZE:
        return f"index_head_dim {index_head_dim} is not a multiple of {mxfp4.GROUP_SIZE}, the channels of one FP4 scale"
    if any(answer.supported for answer in support):
        return None
    refusals = "; ".join(f"{answer.name}: {answer.reason}" for answer in support) or "there is none at all"
    return f"no back end scores FP4 keys on {platform.arch} ({refusals})"


def resolve_index_dtype(
    requested: str, *, index_head_dim: int, platform: Platform, support: Sequence[Support], strict: bool = False
) -> ResolvedIndexDtype:
    """The dtype of the index cache. To be called once per engine, since it logs.

    "auto" takes fp4 where a back end supports it and fp8 elsewhere, never fails, and logs its choice. "fp4" (or
    "mxfp4") on a platform that cannot serve it logs one warning and becomes fp8. Everything else is taken as asked.

    Args:
        requested: "auto", "fp4", "mxfp4", "fp8", "bf16" or "fp32"
        index_head_dim: channels of an index key
        support: as in :func:`fp4_refusal`
        strict: makes that warning an error

    Raises:
        ConfigError: for an unknown ``requested``, or with ``strict`` where fp4 was asked for and cannot be served
    """
    dtype = _ALIASES.get(requested, requested)
    if dtype not in INDEX_DTYPES and dtype != "auto":
        choices = ", ".join(("auto", *INDEX_DTYPES, *_ALIASES))
        raise ConfigError(f"index_cache_dtype {requested!r} is unknown; choose one of {choices}")
    if dtype not in ("auto", "fp4"):
        return ResolvedIndexDtype(dtype, requested, "as asked for")

    refusal = fp4_refusal(index_head_dim, platform, support)
    if dtype == "auto":
        if refusal is None:
            serving = next(answer.name for answer in support if answer.supported)
            resolved = ResolvedIndexDtype("fp4", requested, f"the {serving} back end supports fp4 on {platform.arch}")
        else:
            resolved = ResolvedIndexDtype("fp8", requested, refusal)
        logger.info("index cache dtype auto: %s, because %s", resolved.dtype, resolved.reason)
        return resolved
    if refusal is None:
        return ResolvedIndexDtype("fp4", requested, "as asked for")
    if strict:
        raise ConfigError(
            f"index_cache_dtype {requested} cannot be served: {refusal}; choose fp8, or drop "
            f"--strict-index-cache-dtype to fall back to it"
        )
    logger.warning("index cache dtype %s cannot be served: %s; using fp8 instead", requested, refusal)
    return ResolvedIndexDtype("fp8", requested, refusal)

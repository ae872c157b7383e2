"""RoPE and YaRN in a configuration: ``rope_scaling``, ``rope_parameters`` (flat or in two parts), and loose numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tetrad.models.config_reading import Reading

NAMES = ("rope_scaling", "rope_parameters")
TYPE_NAMES = ("rope_type", "type")

_YARN_NUMBERS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_NEEDED = _YARN_NUMBERS[:2]
_KNOWN = (*TYPE_NAMES, *_YARN_NUMBERS, "attention_factor", "truncate", "rope_theta", "partial_rotary_factor")

# names in the configuration of DeepSeek's inference code -> fields of ModelConfig
INFERENCE_NAMES = {
    "original_seq_len": "rope_original_max_position_embeddings",
    "rope_factor": "rope_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
}


def read(reading: Reading) -> None:
    """Reads both objects; what they say twice must agree."""
    for name in NAMES:
        given = reading.document.get(name)
        if given is not None and not isinstance(given, Mapping):
            reading.report(name, f"is {given!r}, must be an object or null")
        elif given:
            _read_object(reading, name, given)
        elif reading.is_override and name in reading.document:
            reading.put("rope_factor", 1.0, name, "without a factor")
    _read_rotary_factor(reading, "partial_rotary_factor", reading.document.get("partial_rotary_factor"))


def read_inference(reading: Reading) -> None:
    """Reads the loose numbers of DeepSeek's inference code; ``original_seq_len`` 0 switches YaRN off."""
    given = {name: reading.document[name] for name in INFERENCE_NAMES if reading.document.get(name) is not None}
    if given.get("original_seq_len") == 0:
        reading.put("rope_factor", 1.0, "original_seq_len", 0)
        return
    if not reading.is_override:
        if given.get("rope_factor", 1) != 1 and "original_seq_len" not in given:
            reading.report("original_seq_len", f"is missing beside rope_factor {given['rope_factor']!r}; 0 is no YaRN")
        if given.get("original_seq_len") is not None and "rope_factor" not in given:
            text = f"is missing beside original_seq_len {given['original_seq_len']!r}; YaRN needs it"
            reading.report("rope_factor", text)
    for name, value in given.items():
        reading.put(INFERENCE_NAMES[name], value, name)


def _read_object(reading: Reading, name: str, given: Mapping[str, Any]) -> None:
    if "main" not in given and "compress" not in given:
        _read_base(reading, "rope_theta", name, given)
        _read_yarn(reading, name, given)
        return
    parts = {part: given.get(part) for part in ("main", "compress")}
    absent_is_fine = (None,) if reading.is_override else ()
    if not all(isinstance(part, Mapping) or part in absent_is_fine for part in parts.values()):
        reading.report(name, "must have both of main and compress, as objects")
        return
    _read_base(reading, "rope_theta", name, given)
    for key, value in given.items():
        if key not in (*parts, "rope_theta", "partial_rotary_factor") and value is not None:
            reading.report(f"{name}.{key}", f"is {value!r} beside main and compress; put it into one of them")
    main, compress = parts["main"] or {}, parts["compress"] or {}
    _read_base(reading, "rope_theta", f"{name}.main", main)
    _read_base(reading, "compress_rope_theta", f"{name}.compress", compress)
    _read_yarn(reading, f"{name}.main", main, kinds=("default",))
    _read_yarn(reading, f"{name}.compress", compress)


def _read_base(reading: Reading, field: str, name: str, part: Mapping[str, Any]) -> None:
    """The base of the angles and the share of the head that RoPE rotates."""
    if part.get("rope_theta") is not None:
        reading.put(field, part["rope_theta"], f"{name}.rope_theta")
    _read_rotary_factor(reading, f"{name}.partial_rotary_factor", part.get("partial_rotary_factor"))


def _read_yarn(
    reading: Reading, name: str, scaling: Mapping[str, Any], kinds: tuple[str, ...] = ("yarn", "default")
) -> None:
    for key, value in scaling.items():
        if key not in _KNOWN and value is not None:
            reading.report(f"{name}.{key}", f"is not known; known are {', '.join(_KNOWN)}")
    numbers = {key: scaling[key] for key in _YARN_NUMBERS if scaling.get(key) is not None}
    given = [(key, scaling[key]) for key in TYPE_NAMES if scaling.get(key) is not None]
    if len(given) == 2 and given[0][1] != given[1][1]:
        reading.report(f"{name}.type", f"is {given[1][1]!r}, which contradicts rope_type {given[0][1]!r}")
        return
    kind = given[0][1] if given else None
    if kind is not None and kind not in kinds:
        label = f"{name}.{'rope_type' if len(kinds) == 1 else 'type'}"
        reading.report(label, f"is {kind!r}, must be {' or '.join(map(repr, kinds))}")
        return
    extends_yarn = reading.is_override and reading.base.get("rope_factor", 1.0) != 1.0 and "yarn" in kinds
    if kind == "yarn" or (kind is None and numbers and extends_yarn):
        _read_yarn_numbers(reading, name, scaling, numbers, complete=not extends_yarn)
    elif kind is None and numbers and numbers != {"factor": 1}:
        key, value = next(iter(numbers.items()))
        reading.report(f"{name}.type", f"is missing beside {key} {value!r}; 'yarn' scales, 'default' does not")
    elif numbers.get("factor", 1) != 1:
        text = f"is {numbers['factor']!r} beside the type {kind!r}, which does not scale; leave one of them out"
        reading.report(f"{name}.factor", text)
    elif kind == "default" and "yarn" in kinds:
        reading.put("rope_factor", 1.0, f"{name}.type", kind)


def _read_yarn_numbers(
    reading: Reading, name: str, scaling: Mapping[str, Any], numbers: Mapping[str, Any], *, complete: bool
) -> None:
    for key in _NEEDED:
        if complete and key not in numbers:
            reading.report(f"{name}.{key}", "is missing; YaRN needs it")
    for key, value in numbers.items():
        reading.put(f"rope_{key}", value, f"{name}.{key}")
    if scaling.get("attention_factor") not in (None, 1, 1.0):
        # the model does not scale cos and sin
        reading.report(f"{name}.attention_factor", f"is {scaling['attention_factor']!r}, must be 1.0")
    if scaling.get("truncate") not in (None, True):
        reading.report(f"{name}.truncate", f"is {scaling['truncate']!r}, must be true")


def _read_rotary_factor(reading: Reading, name: str, factor: Any) -> None:
    head_dim = reading.known("head_dim")
    if factor is None or not isinstance(head_dim, int):
        return
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        reading.report(name, f"is {factor!r}, must be qk_rope_head_dim / head_dim")
        return
    reading.put("qk_rope_head_dim", int(head_dim * factor), name, factor)

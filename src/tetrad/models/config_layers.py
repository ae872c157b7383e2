"""The layers in a configuration: their kinds, as types or as ratios, and which of them route by token id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tetrad.geometry import BLOCK_SIZE, CSA_RATIO
from tetrad.models.config_reading import Reading

SLIDING, SPARSE, HEAVY = LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_MLP_LAYER_TYPES = ("hash_moe", "moe")
_DEFAULT_HEAVY_RATIO = 128
DEFAULT_RATES = {SPARSE: CSA_RATIO, HEAVY: _DEFAULT_HEAVY_RATIO}


def read(reading: Reading) -> None:
    """Reads ``layer_types``, ``compress_rates`` (and its two single values) and ``mlp_layer_types``."""
    heavy = _read_rates(reading)
    types = reading.document.get("layer_types")
    if types is not None:
        _read_types(reading, types, heavy)
    elif heavy is not None:
        _compare_with_ratios(reading, *heavy)
    mlp_types = reading.document.get("mlp_layer_types")
    if mlp_types is not None:
        _read_mlp_types(reading, mlp_types)


def _read_rates(reading: Reading) -> tuple[str, int] | None:
    """Tokens behind an entry of an HCA layer and the name that says so; None where the document does not."""
    rates = reading.document.get("compress_rates")
    if rates is not None and not isinstance(rates, Mapping):
        reading.report("compress_rates", f"is {rates!r}, must be an object of layer type to ratio")
        rates = None
    rates = dict(rates or {})
    for kind in rates.keys() - set(DEFAULT_RATES):
        reading.report("compress_rates", f"holds {kind!r}, which is none of {', '.join(DEFAULT_RATES)}")
    given = [
        (name, label, kind, value)
        for name, label, kind, value in (
            ("compress_rates", f"has {{!r}} for {SPARSE}", SPARSE, rates.get(SPARSE)),
            ("compress_rates", f"has {{!r}} for {HEAVY}", HEAVY, rates.get(HEAVY)),
            ("compress_rate_csa", "is {!r}", SPARSE, reading.document.get("compress_rate_csa")),
            ("compress_rate_hca", "is {!r}", HEAVY, reading.document.get("compress_rate_hca")),
        )
        if value is not None
    ]
    heavy: tuple[str, int] | None = None
    for name, label, kind, value in given:
        text = label.format(value)
        if kind == SPARSE and value != CSA_RATIO:
            reading.report(name, f"{text}, must be {CSA_RATIO}")
        elif kind == HEAVY and not _is_heavy(value):
            reading.report(name, f"{text}, must be a divisor of {BLOCK_SIZE} other than {CSA_RATIO}")
        elif kind == HEAVY and heavy is not None and heavy[1] != value:
            reading.report(name, f"{text}, which contradicts {heavy[0]} {heavy[1]}; leave one of them out")
        elif kind == HEAVY:
            heavy = (name, value)
    return heavy


def _read_types(reading: Reading, types: Any, heavy: tuple[str, int] | None) -> None:
    layers = reading.known("num_hidden_layers")
    text = _wrong_list(types, LAYER_TYPES) or _too_short(types, layers)
    if text:
        reading.report("layer_types", text)
        if isinstance(types, list | tuple):
            count = layers if isinstance(layers, int) and 0 < layers <= 4096 else len(types)
            reading.values.setdefault("compress_ratios", [0] * count)  # reported already, under the other name
        return
    rates = {SLIDING: 0, SPARSE: CSA_RATIO, HEAVY: heavy[1] if heavy else _base_heavy_ratio(reading)}
    ratios = [rates[kind] for kind in types]
    given = reading.values.setdefault("compress_ratios", ratios)
    if not isinstance(given, list | tuple):
        return
    for layer, (ratio, kind) in enumerate(zip(given, types, strict=False)):
        if ratio != rates[kind]:
            said = f"layer {layer} is {kind} (ratio {rates[kind]}) here and has the ratio {ratio!r} there"
            reading.report("layer_types", f"contradicts compress_ratios: {said}; leave one of them out")
            return


def _base_heavy_ratio(reading: Reading) -> int:
    """The HCA ratio of the document that is overridden, else the released models'."""
    ratios = reading.base.get("compress_ratios")
    heavy = [ratio for ratio in ratios if _is_heavy(ratio)] if isinstance(ratios, list | tuple) else []
    return heavy[0] if heavy else _DEFAULT_HEAVY_RATIO


def _compare_with_ratios(reading: Reading, name: str, heavy: int) -> None:
    ratios = reading.values.get("compress_ratios")
    base = reading.base.get("compress_ratios")
    if ratios is None and isinstance(base, list | tuple):
        reading.values["compress_ratios"] = [heavy if _is_heavy(ratio) else ratio for ratio in base]
    if not isinstance(ratios, list | tuple):
        return
    other = [ratio for ratio in ratios if _is_heavy(ratio) and ratio != heavy]
    if other:
        text = f"gives HCA layers the ratio {heavy}, which contradicts the {other[0]} in compress_ratios"
        reading.report(name, f"{text}; leave one of them out")


def _read_mlp_types(reading: Reading, types: Any) -> None:
    if text := _wrong_list(types, _MLP_LAYER_TYPES):
        reading.report("mlp_layer_types", text)
        return
    hashed = list(types).count("hash_moe")
    if "hash_moe" in types[hashed:]:
        reading.report("mlp_layer_types", "has hash_moe behind moe; the hash layers must come first")
    elif text := _too_short(types, reading.known("num_hidden_layers")):
        reading.report("mlp_layer_types", text)
    elif (other := reading.values.setdefault("num_hash_layers", hashed)) != hashed:
        text = f"contradicts num_hash_layers {other!r}: it has {hashed} hash_moe; leave one of them out"
        reading.report("mlp_layer_types", text)


def _is_heavy(ratio: Any) -> bool:
    is_integer = isinstance(ratio, int) and not isinstance(ratio, bool)
    return is_integer and ratio > 0 and ratio != CSA_RATIO and BLOCK_SIZE % ratio == 0


def _wrong_list(given: Any, allowed: tuple[str, ...]) -> str | None:
    """What is wrong with a list of layer types, None if nothing is."""
    must = f"must be a list of: {', '.join(allowed)}"
    if not isinstance(given, list | tuple):
        return f"is {given!r}, {must}"
    wrong = sorted({repr(kind) for kind in given if kind not in allowed})
    return f"holds {', '.join(wrong)}; {must}" if wrong else None


def _too_short(given: list[str] | tuple[str, ...], layers: Any) -> str | None:
    """Whether a list leaves layers without a type. A longer one is cut, as those of prediction layers are."""
    if isinstance(layers, int) and len(given) < layers:
        return f"has {len(given)} entries, must have one for each of the {layers} layers"
    return None

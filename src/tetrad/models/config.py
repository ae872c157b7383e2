"""The model's configuration: one frozen record, whatever form of config.json it came from."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tetrad.errors import ConfigError
from tetrad.geometry import CSA_RATIO
from tetrad.models import config_checks, config_forms

logger = logging.getLogger(__name__)


class LayerKind(enum.Enum):
    """What a layer's attention sees besides its sliding window."""

    SWA = "swa"  # nothing else
    CSA = "csa"  # the compressed entries that the indexer chose
    HCA = "hca"  # all of its (heavily) compressed entries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that the DeepSeek-V4 model needs to know about itself.

    The names are those of the released config.json. ``compress_ratios`` has exactly ``num_hidden_layers`` entries
    (those of the multi-token-prediction layers are cut off): 0 is a sliding-window layer, 4 a CSA layer, any other an
    HCA layer. ``rope_factor`` 1.0 means that the compressed layers use plain RoPE at ``compress_rope_theta``, without
    YaRN. ``quantized`` says that the checkpoint's linears are FP8; ``expert_dtype`` how its routed experts are stored
    ("fp4", "fp8", or None where the configuration does not say).

    Raises:
        ConfigError: one error that names every value that cannot be used and what is allowed instead.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    num_hash_layers: int
    compress_ratios: tuple[int, ...]
    # the values below are the same in every released model
    n_shared_experts: int = 1
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    rope_factor: float = 1.0
    rope_original_max_position_embeddings: int = 65_536
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    max_position_embeddings: int = 1_048_576
    bos_token_id: int | None = 0
    eos_token_id: tuple[int, ...] = (1,)
    torch_dtype: str = "bfloat16"
    expert_dtype: str | None = None
    quantized: bool = False

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        _raise_if_any(config_checks.problems(values), "the model configuration")
        for name, value in config_checks.normalised(values).items():
            object.__setattr__(self, name, value)

    @property
    def nope_head_dim(self) -> int:
        """Leading dimensions of a head that RoPE leaves alone."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def csa_ratio(self) -> int:
        """Tokens per compressed entry of a CSA layer."""
        return CSA_RATIO

    @property
    def hca_ratio(self) -> int | None:
        """Tokens per compressed entry of the HCA layers, None in a model without them."""
        return next((ratio for ratio in self.compress_ratios if ratio not in (0, CSA_RATIO)), None)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        kinds = {0: LayerKind.SWA, CSA_RATIO: LayerKind.CSA}
        return tuple(kinds.get(ratio, LayerKind.HCA) for ratio in self.compress_ratios)

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """The indices of the layers of one kind, ascending."""
        return tuple(layer for layer, other in enumerate(self.layer_kinds) if other is kind)

    def is_hash_layer(self, layer: int) -> bool:
        """Whether the layer's experts are looked up by token id instead of chosen by score."""
        return layer < self.num_hash_layers

    @classmethod
    def from_dict(
        cls,
        document: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        *,
        source: str = "the model configuration",
    ) -> ModelConfig:
        """Reads any of the three forms of a configuration.

        The released config.json, the one for DeepSeek's own inference code (``dim``, ``n_layers``, ...), and what
        transformers writes (``layer_types``, ``compress_rates``, nested ``rope_parameters``).

        Args:
            document: the parsed JSON object.
            overrides: values that win over the document, by any name that its form has (``rope_scaling``,
                ``layer_types``, ``dtype``, ...) or by the name of a field of this class. An override also replaces what
                the document says under another name for the same thing. ``rope_scaling``, ``rope_parameters``,
                ``compress_rates`` and ``quantization_config`` may hold only what changes; with a type (a
                ``quant_method``) of their own, or as null, they replace the whole object.
            source: what an error calls the document.

        Raises:
            ConfigError: one error with every value that is missing, unknown or out of range, or that contradicts
                another.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        values, problems = config_forms.read(document, overrides, fields=list(known))
        _warn_of_unread(document, source)
        config_forms.truncate_ratios(values)
        reported = {problem.field for problem in problems}
        for name, field in known.items():
            if name not in values and field.default is not dataclasses.MISSING:
                values[name] = field.default
        problems += [
            problem for problem in config_checks.problems(values, list(known)) if problem.field not in reported
        ]
        _raise_if_any([_named(problem, overrides or {}) for problem in problems], source)
        return cls(**values)

    @classmethod
    def from_pretrained(cls, folder: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads the configuration of a model folder (or one JSON file); see ``from_dict``.

        Raises:
            ConfigError: also where the file is missing, is not JSON or is not an object.
        """
        path = Path(folder)
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            what = "the folder has no config.json" if Path(folder).is_dir() else "there is no such folder"
            raise ConfigError(
                f"cannot read the model configuration {path}: {what}. Give the folder of a checkpoint; nothing is "
                f"downloaded."
            )
        try:
            # editors on Windows begin a file with a byte-order mark
            document = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read the model configuration {path}: it is not valid JSON ({error}).") from error
        if not isinstance(document, dict):
            raise ConfigError(f"cannot read the model configuration {path}: it must hold one JSON object.")
        return cls.from_dict(document, overrides, source=str(path))

    def to_native_dict(self) -> dict[str, Any]:
        """This configuration as the released config.json spells it; ``from_dict`` gives back an equal record."""
        return config_forms.write_native(dataclasses.asdict(self))


def _named(problem: config_checks.Problem, overrides: Mapping[str, Any]) -> config_checks.Problem:
    """The problem, with a word on where the value came from if the document is not to blame."""
    if problem.field.partition(".")[0] not in overrides:
        return problem
    return config_checks.Problem(problem.field, f"{problem.text} (given as an override)")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no name stands twice with different values, of which one would win without a word."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result and result[name] != value:
            raise ValueError(f"the name {name!r} stands twice, with {result[name]!r} and {value!r}")
        result[name] = value
    return result


def _warn_of_unread(document: Mapping[str, Any], source: str) -> None:
    names = [name for name in document if not config_forms.is_known(name)]
    if names:
        logger.warning("%s: not read, since nothing here knows them: %s", source, ", ".join(names))


def _raise_if_any(problems: list[config_checks.Problem], source: str) -> None:
    if problems:
        lines = "".join(f"\n  - {problem.field}: {problem.text}" for problem in problems)
        count = "1 value" if len(problems) == 1 else f"{len(problems)} values"
        raise ConfigError(f"{source}: {count} cannot be used:{lines}")

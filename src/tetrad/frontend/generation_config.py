"""What a checkpoint's ``generation_config.json`` says about how to generate: end tokens and sampling defaults."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tetrad import bundled
from tetrad.errors import ConfigError, RequestError
from tetrad.frontend.sampling_params import SamplingParams

FILE = "generation_config.json"
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of the file and the fields of ``SamplingParams`` that they set. All other keys but ``eos_token_id`` are left."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The part of the file that the engine follows.

    Attributes:
        path: the file, None where none is read.
        eos_token_ids: end an output, as the ids of config.json and of the tokenizer do.
        sampling_params: for requests that give none; what a request gives stands as it is.
        changed: the fields of ``sampling_params`` that the file sets to something else than their default.
    """

    path: Path | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    changed: tuple[str, ...] = ()

    @classmethod
    def load(cls, model: str | Path, choice: str | Path = "auto") -> GenerationConfig:
        """Reads the file that ``choice`` names.

        "auto" is that of the model's folder, where there is one; "none" reads no file; anything else is a folder.

        Raises:
            ConfigError: the named folder has no such file, or the file cannot be followed.
        """
        choice = str(choice)
        if choice == "none":
            return cls()
        path = Path(bundled.resolve(model) if choice == "auto" else choice) / FILE
        if not path.exists() and not path.is_symlink():  # a link to nowhere is a broken download
            if choice == "auto":
                return cls()
            raise ConfigError(
                f"generation_config {choice!r} is not a folder with a {FILE}; "
                f"give auto (the model's folder), none, or such a folder"
            )
        document = _read(path)
        try:
            params = SamplingParams(**_sampling(document))
        except RequestError as error:
            raise _wrong(path, str(error)) from error
        default = SamplingParams()
        changed = tuple(name for name in _SAMPLING.values() if getattr(params, name) != getattr(default, name))
        return cls(path, _eos_token_ids(path, document.get("eos_token_id")), params, changed)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses end tokens that the model does not have.

        Raises:
            ConfigError: an id is ``vocab_size`` or larger.
        """
        largest = max(self.eos_token_ids, default=-1)
        if self.path is not None and largest >= vocab_size:
            raise _wrong(self.path, f"eos_token_id: holds {largest}; the model's token ids are 0 to {vocab_size - 1}")

    def news(self, known_eos_token_ids: Collection[int]) -> str:
        """What the file changes, as one sentence; empty where it changes nothing."""
        further = sorted(set(self.eos_token_ids) - set(known_eos_token_ids))
        parts = []
        if further:
            parts.append(f"outputs also end at token {' or '.join(map(str, further))}")
        if self.changed:
            values = ", ".join(f"{name} {getattr(self.sampling_params, name)}" for name in self.changed)
            parts.append(f"the sampling defaults are {values}")
        return f"{self.path}: {'; '.join(parts)} (--generation-config none ignores the file)" if parts else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); {_ADVICE}") from error
    if not isinstance(document, dict):
        raise _wrong(path, f"holds {type(document).__name__}, not one JSON object")
    return document


def _sampling(document: dict[str, Any]) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that the file sets; null leaves a default."""
    return {name: document[key] for key, name in _SAMPLING.items() if document.get(key) is not None}


def _eos_token_ids(path: Path, value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise _wrong(path, f"eos_token_id: is {value!r}, must be a token id or a list of them")
    return tuple(ids)


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: {what}; {_ADVICE}")


_ADVICE = "correct the file, or leave it out with --generation-config none"

"""Text to token ids and back, for a model folder that ships ``tokenizer.json``."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders

from tetrad.errors import ConfigError, RequestError


class Tokenizer:
    """The ``tokenizers`` library behind the few calls that the engine needs.

    Nothing is added to a text: no begin or end of sequence, no padding, no truncation. Special tokens that stand in the
    text become their ids.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_token_ids: Sequence[int] = ()) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._bytes_of_token: dict[int, bytes] = {}
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self.is_byte_level: bool = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self.largest_token_id: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def load(cls, folder: str | Path, vocab_size: int | None = None) -> Tokenizer | None:
        """Reads ``tokenizer.json`` and, for the end-of-sequence id, ``tokenizer_config.json``.

        Args:
            folder: a model folder.
            vocab_size: the model's number of token ids, to be checked against.

        Returns:
            None where the folder has no ``tokenizer.json``: such a model takes prompts of token ids alone.

        Raises:
            ConfigError: a file that cannot be read, or ids that the model does not have.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.exists() and not path.is_symlink():  # a link to nowhere is a broken download, not an id-only model
            return None
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{path} is not a readable tokenizer ({error}); copy the file again") from error
        loaded = cls(tokenizer, _eos_token_ids(Path(folder) / "tokenizer_config.json", tokenizer))
        if vocab_size is not None and loaded.largest_token_id >= vocab_size:
            raise ConfigError(
                f"{path} has token id {loaded.largest_token_id}, but the model's vocab_size is {vocab_size}; "
                "use the tokenizer.json that belongs to this model"
            )
        return loaded

    def encode(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
            RequestError: it is no text, or holds a lone surrogate, which no encoding of characters has.
        """
        if not isinstance(text, str):
            raise RequestError(f"the tokenizer encodes one text, not {type(text).__name__}; encode several one by one")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate ({text[error.start]!r}) at character {error.start}; give valid Unicode"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(
        self, token_ids: int | Sequence[int] | np.ndarray | torch.Tensor, *, skip_special_tokens: bool = True
    ) -> str:
        """The text of the ids. Bytes that make no character are U+FFFD; ids without a token give nothing.

        Raises:
            RequestError: they are no token ids.
        """
        try:
            ids: list[Any] = [token_ids] if isinstance(token_ids, int) else list(token_ids)
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise RequestError(
                f"the tokenizer decodes token ids, integers from 0 to 2**32 - 1, not {reprlib.repr(token_ids)}"
            ) from error

    def decode_token(self, token_id: int) -> str:
        """One token's text alone, that of a special token included."""
        return self.decode([token_id], skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        """Whether :meth:`decode` leaves the token out."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token of a byte-level vocabulary stands for, special or not; none for an unknown id.

        A token is written with one printable character for each byte. Tokens that were added as text hold characters
        outside that alphabet and stand for their own UTF-8.
        """
        known = self._bytes_of_token.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) or ""
            try:
                known = bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                known = token.encode("utf-8")
            self._bytes_of_token[token_id] = known
        return known


def require_tokenizer(tokenizer: Tokenizer | None, purpose: str) -> Tokenizer:
    """The tokenizer, or the error for a request that needs one where the model folder has none.

    Args:
        purpose: what needs it, as a plural that starts the sentence: ``"text prompts"``, ``"stop strings"``.

    Raises:
        RequestError: there is no tokenizer.
    """
    if tokenizer is None:
        raise RequestError(
            f"{purpose} need a tokenizer, and the model folder has no tokenizer.json; "
            "give prompts as lists of token ids and stops as stop_token_ids, or add the file"
        )
    return tokenizer


def _byte_alphabet() -> dict[str, int]:
    """The character of each byte in byte-level vocabularies (GPT-2): printable Latin-1 characters stand for themselves,
    the other 68 bytes, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _eos_token_ids(path: Path, tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    if not path.is_file():
        return ()
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); copy the file again") from error
    eos = settings.get("eos_token") if isinstance(settings, dict) else None
    content = eos.get("content") if isinstance(eos, dict) else eos
    if content is None:
        return ()
    token_id = tokenizer.token_to_id(content) if isinstance(content, str) else None
    if token_id is None:
        raise ConfigError(f"{path} names the eos_token {content!r}, which tokenizer.json does not have; correct one")
    return (token_id,)

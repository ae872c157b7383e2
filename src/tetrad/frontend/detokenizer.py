"""A request's text, token by token, and the stop strings in it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tetrad.frontend.tokenizer import Tokenizer, require_tokenizer

_REPLACEMENT = "\ufffd"
# Tokens of the prompt that the first generated ones are decoded behind. One visible token is enough to keep the space
# that a decoder drops at the start of a text; more cost nothing.
_PROMPT_CONTEXT = 8
# A character has at most four bytes, so a longer wait is not for one character alone.
_PATIENCE = 8


class Detokenizer:
    """Turns generated ids into text as they come.

    The text is what ``Tokenizer.decode`` gives for all the generated ids at once, special tokens left out, whatever the
    split into tokens. Decoders that drop a leading space at the start of a text keep it here, since the output goes on
    from the prompt. A prompt that ends inside a character has no claim on the output's first bytes: bytes that make no
    character of their own are U+FFFD.

    Text is held back while its last bytes may still become a character, and while its end may still become a stop
    string; so what was once in :attr:`text` stays. The first stop string to be complete wins, as if the text had come
    character by character; of several that are complete with the same character, the longest. The text is cut before
    it, and what comes after is dropped.

    Neither :meth:`append` nor :meth:`take_new_text` costs more the longer the output is; :attr:`text` joins it all.

    Args:
        tokenizer: None where the model folder has none; the text is then empty.
        prompt_token_ids: the prompt that the output follows.
        stop: stop strings, none empty.
        min_tokens: stop strings that end in the text of this many first tokens do not count.

    Raises:
        RequestError: stop strings without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decoder: _Decoder | None = None
        if stop:
            tokenizer = require_tokenizer(tokenizer, "stop strings")
        if tokenizer is not None:
            self._decoder = (
                _ByteDecoder(tokenizer) if tokenizer.is_byte_level else _WindowDecoder(tokenizer, prompt_token_ids)
            )
        self._stops = [_StopString(string) for string in stop]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._text = ""
        self._unjoined: list[str] = []  # behind _text; joined when somebody reads it
        self._untaken: list[str] = []
        self._held = ""
        self._stop_string: str | None = None
        self._finished = False

    @property
    def text(self) -> str:
        """The text so far, less what is held back; after :meth:`finish` all of it."""
        if self._unjoined:
            self._text += "".join(self._unjoined)
            self._unjoined.clear()
        return self._text

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, None while none did."""
        return self._stop_string

    def append(self, token_id: int) -> None:
        """Takes the next generated id. Ids that come after a stop string or :meth:`finish` change nothing."""
        if self._finished or self._decoder is None:
            return
        self._num_tokens += 1
        self._extend(self._decoder.push(token_id))

    def finish(self) -> None:
        """Ends the text: bytes that never became a character are U+FFFD, and nothing is held back any more."""
        if self._finished or self._decoder is None:
            return
        self._extend(self._decoder.flush())
        self._release(self._held)
        self._held = ""
        self._finished = True

    def take_new_text(self) -> str:
        """The part of :attr:`text` that came since the last call, for streaming."""
        new = "".join(self._untaken)
        self._untaken.clear()
        return new

    def _release(self, text: str) -> None:
        if text:
            self._unjoined.append(text)
            self._untaken.append(text)

    def _extend(self, new: str) -> None:
        if not self._stops:
            self._release(new)
            return
        armed = self._num_tokens > self._min_tokens
        for position, character in enumerate(new):
            complete = [stop for stop in self._stops if stop.advance(character)]
            if complete and armed:
                longest = max(complete, key=lambda stop: len(stop.string))
                text = self._held + new[: position + 1]
                self._release(text[: len(text) - len(longest.string)])
                self._held = ""
                self._stop_string = longest.string
                self._finished = True
                return
        text = self._held + new
        safe = len(text) - max(stop.num_matched for stop in self._stops)
        self._release(text[:safe])
        self._held = text[safe:]


class _StopString:
    """One string looked for in a text that comes by the character (Knuth, Morris and Pratt)."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0  # the length of the longest start of the string that the text now ends with
        self._borders = [0] * len(string)
        border = 0
        for end in range(1, len(string)):
            while border and string[end] != string[border]:
                border = self._borders[border - 1]
            border += string[end] == string[border]
            self._borders[end] = border

    def advance(self, character: str) -> bool:
        """Takes the next character; True where the string ends with it."""
        while self.num_matched and self.string[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched - 1]
        self.num_matched += self.string[self.num_matched] == character
        if self.num_matched < len(self.string):
            return False
        self.num_matched = self._borders[-1]
        return True


class _Decoder(Protocol):
    def push(self, token_id: int) -> str:
        """Takes a token and gives the text that is now certain."""
        ...

    def flush(self) -> str:
        """Gives the rest of the text."""
        ...


class _ByteDecoder:
    """For byte-level vocabularies: a token is bytes, and a text is their UTF-8, whatever the token boundaries."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For any other decoder: new tokens are decoded behind those that gave the last text, and the difference is new.

    Text that ends with U+FFFD may be a character whose bytes are still to come, so it waits. Where a decoder would
    rewrite a character that was shown already, because bytes that make none follow it, the shown one stays.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = self._context_from_prompt(prompt_token_ids)
        self._context_text = tokenizer.decode(self._context)
        if self._context_text.endswith(_REPLACEMENT):
            self._context, self._context_text = [], ""
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id):
            return ""
        self._waiting.append(token_id)
        if not self._worth_decoding():
            return ""
        text = self._tokenizer.decode(self._context + self._waiting)
        if len(text) <= len(self._context_text) or text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._context_text) :]
        self._context, self._waiting = self._waiting, []
        self._context_text = self._tokenizer.decode(self._context)
        return new

    def flush(self) -> str:
        text = self._tokenizer.decode(self._context + self._waiting)
        self._waiting = []
        return text[len(self._context_text) :]

    def _worth_decoding(self) -> bool:
        """Spares a long row of bytes that make no character from being decoded anew for each of its tokens."""
        count = len(self._waiting)
        if count <= _PATIENCE or count & (count - 1) == 0:
            return True
        return _REPLACEMENT not in self._tokenizer.decode(self._waiting[-1:])

    def _context_from_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if len(context) == _PROMPT_CONTEXT:
                break
            if not self._tokenizer.is_special(token_id):
                context.append(token_id)
        return context[::-1]

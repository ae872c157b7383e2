"""The prompts of ``tetrad generate``: from flags, a file, standard input, or one on each line of JSON.

A line that cannot be used is an item with an error; it never stops the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tetrad.errors import ConfigError, RequestError
from tetrad.frontend.sampling_params import SamplingParams

_BOM = b"\xef\xbb\xbf"
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_OPENAI = ("custom_id", "method", "url", "body")
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_NO_CHAT = '"messages" need a chat encoding, and tetrad has none yet; give the whole text as "prompt"'
_FORMS = (
    'a line is a JSON object with a "prompt" (text or token ids), "prompt_token_ids", or, as in a batch of OpenAI\'s, '
    '"custom_id", "method", "url" and "body"'
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"stream": (False,), "echo": (False,), "best_of": (1,), "suffix": ("",)}
"""Keys of a body that ask for nothing with these values."""
_UNREAD = ("model", "user", "metadata", "store")
"""Keys of a body that change no token."""


@dataclass
class Item:
    """One prompt of the input: what to run, or why it cannot be.

    Attributes:
        name: the request_id of its result, an int where the line has an int.
        line: its line in a file of JSON lines, from 1, and ``digest`` a hash of it; None for other prompts.
        custom_id: of a line of an OpenAI batch.
    """

    name: str | int
    prompt: Any = None  # whatever the line holds; the engine checks it
    params: SamplingParams = SamplingParams()
    line: int | None = None
    digest: str | None = None
    custom_id: str | int | None = None
    error: str | None = None

    def fail(self, reason: object) -> None:
        """Note why there is no result, with the line."""
        self.error = str(reason) if self.line is None else f"line {self.line}: {reason}"

    def key(self, settings: str) -> str:
        """What a result depends on, as hex digits. ``settings``: the same for the model and its options."""
        params = dataclasses.asdict(self.params)
        prompt = self.digest or self.prompt
        text = json.dumps([settings, self.name, self.line, prompt, params], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def text_of(data: bytes, source: object) -> str:
    """The text of a prompt file, line ends as they are, without a byte-order mark.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        return data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {source}: {error}") from error


def items_of_lines(data: bytes, defaults: SamplingParams, seed: int | None) -> Iterator[Item]:
    """An item for each line that is not blank.

    defaults: sampling parameters that a line does not name. seed: None, or the engine's seed; a line without a seed of
    its own then draws by its number, whatever else is refused or done already.
    """
    # split the bytes at line feeds alone: characters such as U+2028 may stand in a JSON string
    for number, line in enumerate(data.removeprefix(_BOM).split(b"\n"), start=1):
        if not line.strip():
            continue
        item = Item(f"line {number}", line=number, digest=hashlib.sha256(line).hexdigest())
        try:
            _fill(item, line.decode("utf-8"), defaults)
        except UnicodeDecodeError as error:
            item.fail(f"not UTF-8 ({error})")
        except RequestError as error:
            item.fail(error)
        except (ValueError, RecursionError) as error:  # not only JSONDecodeError: numbers may be too long, too
            item.fail(f"not JSON ({error})")
        else:
            if seed is not None and item.params.seed is None:
                item.params = dataclasses.replace(item.params, seed=_seed_of_line(seed, number))
        yield item


def _seed_of_line(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _fill(item: Item, line: str, defaults: SamplingParams) -> None:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise RequestError(_FORMS)
    keys = list(record)
    name = _identifier(record, "request_id")
    item.custom_id = _identifier(record, "custom_id")
    for chosen in (item.custom_id, name):
        item.name = item.name if chosen is None else chosen
    known = (*_PROMPTS, "request_id", "custom_id")
    if "body" in record:
        record, known = _body(record), ("prompt", *_NEUTRAL, *_UNREAD)
    elif not any(key in record for key in _PROMPTS):
        raise RequestError(f"{_FORMS}; this one has {', '.join(map(repr, keys)) or 'no keys'}")
    item.prompt = _prompt(record)
    _refuse_unknown(record, (*known, *sorted(_SAMPLING)))
    item.params = dataclasses.replace(defaults, **record)


def _identifier(record: dict[str, Any], key: str) -> str | int | None:
    value = record.pop(key, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise RequestError(f"{key} {json.dumps(value)} is neither a string nor an integer")
    return value


def _prompt(record: dict[str, Any]) -> Any:
    given = [key for key in _PROMPTS if key in record]
    if "messages" in given:
        raise RequestError(_NO_CHAT)
    if len(given) != 1:
        raise RequestError('give one of "prompt" and "prompt_token_ids"' + (", not both" if given else ""))
    prompt = record.pop(given[0])
    if given == ["prompt_token_ids"] and not isinstance(prompt, list):
        raise RequestError(f"prompt_token_ids is a list of token ids, not {type(prompt).__name__}")
    if not isinstance(prompt, (str, list)):
        kind = "an object" if isinstance(prompt, dict) else json.dumps(prompt)
        raise RequestError(f"a prompt is text or a list of token ids, not {kind}")
    if given == ["prompt"] and isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # clients of OpenAI's completions send a list, even of one
    if isinstance(prompt, list) and any(isinstance(part, (str, list, dict)) for part in prompt):
        raise RequestError("a prompt is text or a list of token ids; write a line for each of several prompts")
    return prompt


def _refuse_unknown(record: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(key for key in record if key not in _SAMPLING)
    if unknown:
        raise RequestError(f"unknown keys {', '.join(unknown)}; known are {', '.join(known)}")


def _body(record: dict[str, Any]) -> dict[str, Any]:
    """The request in a line of an OpenAI batch, with our names of its parameters. A null there means the default."""
    strange = sorted(set(record) - set(_OPENAI))
    if strange:
        raise RequestError(f"unknown keys {', '.join(strange)} beside a body; known are {', '.join(_OPENAI)}")
    if record.get("method", "POST") != "POST":
        raise RequestError(f"method {json.dumps(record['method'])} is not POST")
    url = record.get("url", _COMPLETIONS)
    if url == _CHAT:
        raise RequestError(f"url {_CHAT}: {_NO_CHAT}, with the url {_COMPLETIONS}")
    if url != _COMPLETIONS:
        raise RequestError(f"url {json.dumps(url)} is not served; give {_COMPLETIONS}")
    if not isinstance(record["body"], dict):
        raise RequestError("body is not a JSON object")
    body = {key: value for key, value in record["body"].items() if value is not None and key not in _UNREAD}
    for key, neutral in _NEUTRAL.items():
        if key in body and (value := body.pop(key)) not in neutral:
            raise RequestError(f"{key}={json.dumps(value)} is not possible in a body; leave it out")
    return body

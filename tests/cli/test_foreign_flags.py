"""What users of vLLM, SGLang and ATOM type: answered by name, never by a flag that only looks alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import leaf_parsers
from tetrad.cli.foreign_flags import FOREIGN_FLAGS, markdown_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "flags.md"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        # each of these once got the name of a flag that does something else
        ("--enforce-eager", "it is not needed: the engine captures no CUDA graphs"),
        ("-tp", "it is not supported yet: the engine runs on one device"),
        ("--quantization", "it is not needed: how the weights are stored stands in"),
        ("--max-running-requests", "use --max-num-seqs (sequences are counted, not requests)"),
        ("--mem-fraction-static", "use --gpu-memory-utilization or --kv-cache-memory-gb (a share of the GPU"),
        ("--attention-config", "use --index-cache-dtype (its indexer_kv_dtype"),
        ("--num_speculative_tokens", "it is not supported yet: there is no speculative decoding"),
        ("--trust-remote-code", "it is not needed: no code of a checkpoint is ever run"),
        ("--port=8000", "it is not supported yet: there is no server"),
    ],
)
def test_a_foreign_flag(tetrad, flag, message):
    run = tetrad("generate", "m", flag)
    assert (run.code, run.out) == (2, "")
    assert message in run.err


def test_the_exact_equivalents_are_accepted(tetrad, ids_model):
    """SGLang's --context-length was answered with --model-path."""
    aliases = ("--context-length=64", "--page-size=256", "--random-seed=3", "--json-model-override-args={}")
    head = ("generate", "--model-path", ids_model, "--load-dummy", "--device=cpu", "--max-num-seqs=1")
    theirs = tetrad(*head, *aliases, "--prompt-token-ids=5", "--max-new-tokens=2")
    assert theirs.code == 0, theirs.err
    own = ("--max-model-len=64", "--block-size=256", "--seed=3", "--hf-overrides={}")
    assert tetrad(*head, *own, "--prompt-token-ids=5", "--max-tokens=2").out == theirs.out


@pytest.mark.parametrize("flag", ["--context-size", "--eager", "--turbo-mode", "--sampling-seeds-per-user", "-x"])
def test_what_is_like_nothing_gets_no_suggestion(tetrad, flag):
    """The cutoff was so low that nearly every word was like some flag."""
    assert "did you mean" not in tetrad("generate", "m", flag).err


def test_no_foreign_name_is_one_of_ours():
    """Such a line of the table could never be shown, and each name has one answer."""
    names = [name for foreign in FOREIGN_FLAGS for name in foreign.names]
    assert len(names) == len(set(names))
    assert not set(names) & set(leaf_parsers()["tetrad generate"].flags)
    for foreign in FOREIGN_FLAGS:
        assert set(foreign.here) <= set(leaf_parsers()["tetrad generate"].flags)
        assert "--" not in foreign.text


def test_the_document_has_the_table():
    """``docs/flags.md`` is what the commands answer, no more and no less."""
    assert markdown_table() in DOCUMENT.read_text(encoding="utf-8")

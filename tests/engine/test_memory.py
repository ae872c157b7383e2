"""The peak of a long prefill, through engine and model: it follows the budget of index scores and nothing larger."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.engine.small import random_ids, small_config, small_engine, write_config
from tests.ops.test_index_topk import Ledger
from tetrad import LLMEngine, SamplingParams
from tetrad.geometry import width_blocks

index_topk_module = import_module("tetrad.ops.index_topk")

MIB = 1 << 20
PROMPT = 32_768
ENTRIES = PROMPT // 4
ALL_SCORES = PROMPT * ENTRIES * 4  # 1 GiB


@pytest.fixture(scope="module")
def thin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One CSA layer, as thin as can be, so that next to nothing but the scores depends on the number of rows."""
    config = small_config(
        num_hidden_layers=1,
        compress_ratios=(4,),
        hidden_size=16,
        hc_mult=1,
        num_attention_heads=1,
        head_dim=16,
        qk_rope_head_dim=4,
        q_lora_rank=8,
        o_lora_rank=8,
        index_n_heads=1,
        index_topk=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        max_position_embeddings=1 << 20,
    )
    return write_config(tmp_path_factory.mktemp("models") / "thin", config)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Stubs the scoring and the choosing, which would take hours; the (rows, width) of every call."""
    shapes: list[tuple[int, int]] = []

    def score(q: torch.Tensor, *_arguments, width: int, **_options) -> torch.Tensor:
        shapes.append((q.shape[0], width))
        return torch.empty((q.shape[0], width))

    def choose(_logits: torch.Tensor, _visible_end: torch.Tensor, _k: int, *, out: torch.Tensor) -> torch.Tensor:
        return out.fill_(-1)

    monkeypatch.setattr(index_topk_module, "indexer_logits", score)
    monkeypatch.setattr(index_topk_module, "topk_indices", choose)
    return shapes


def standing(engine: LLMEngine) -> list[torch.Tensor]:
    """What is there before the first step: weights, caches, and the buffers of a step."""
    runner = engine.runner
    table = runner.table
    buffers = [table.block_table, table.length, table.last_token, table._buffer._host]
    return [*runner.model.parameters(), *runner.model.buffers(), *runner.pools.pools.values(), *buffers]


def prefill_peak(folder: Path, **options) -> int:
    """Most bytes alive at once in the one step that computes a prompt, beyond weights and caches."""
    engine = small_engine(
        folder, **{"max_model_len": PROMPT + 1, "max_num_seqs": 1, "max_num_batched_tokens": PROMPT} | options
    )
    engine.add_request(random_ids(PROMPT, seed=1), SamplingParams(max_tokens=1))
    with Ledger(standing(engine)) as ledger:
        (output,) = engine.step()
    assert output.finished
    return ledger.peak


def test_the_budget_bounds_the_peak(thin_folder, scored):
    """With a budget of 2 GiB all scores of 32k rows are held at once, a gigabyte; with 32 MiB a thirty-second of it."""
    prefill_peak(thin_folder, indexer_logits_budget_mb=32)  # what is made once, whatever the budget
    peaks = {}
    for mib in (0, 2048, 256, 32):
        scored.clear()
        peaks[mib] = prefill_peak(thin_folder, indexer_logits_budget_mb=mib)
        assert sum(rows for rows, _ in scored) == PROMPT
        assert {width for _, width in scored} == {ENTRIES}, "as wide as what is cached, not as max_model_len"
        if 0 < mib < 1024:
            assert max(rows * width * 4 for rows, width in scored) == mib * MIB
    rest = peaks[0] - ALL_SCORES
    assert 0 < rest < 64 * MIB
    assert peaks[2048] == peaks[0]
    assert peaks[256] == 256 * MIB + rest
    # here something else is the largest: the gathered keys of attention, which have a bound of their own, beside the
    # slots of 128 window keys for every row
    assert peaks[32] < 200 * MIB


def test_the_budget_is_two_gib_unless_said_otherwise(thin_folder, scored, monkeypatch):
    """The flag's default and the variable reach the model, not only the configuration."""
    monkeypatch.delenv("ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB", raising=False)
    prefill_peak(thin_folder)
    assert scored == [(PROMPT, ENTRIES)]
    scored.clear()
    monkeypatch.setenv("ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB", "64")
    prefill_peak(thin_folder)
    assert scored == [(2048, ENTRIES)] * 16


def test_the_peak_does_not_grow_with_the_models_length(thin_folder, scored):
    """Room for 30 times the prompt: the same peak, to the byte."""
    expected = prefill_peak(thin_folder, indexer_logits_budget_mb=256)
    long = prefill_peak(thin_folder, indexer_logits_budget_mb=256, max_model_len=1 << 20)
    assert long == expected


def test_the_peak_of_chunks_grows_with_the_chunk(thin_folder, scored):
    """Chunks of 2k tokens: the scores of one chunk are held, as wide as the bucket of its end."""
    engine = small_engine(
        thin_folder, max_model_len=PROMPT + 1, max_num_seqs=1, max_num_batched_tokens=2048, indexer_logits_budget_mb=0
    )
    engine.add_request(random_ids(PROMPT, seed=1), SamplingParams(max_tokens=1))
    with Ledger(standing(engine)) as ledger:
        while engine.has_unfinished_requests:
            engine.step()
    assert scored == [(2048, 64 * width_blocks(end)) for end in range(2048, PROMPT + 1, 2048)]
    assert 2048 * ENTRIES * 4 <= ledger.peak < 2048 * ENTRIES * 4 + 64 * MIB

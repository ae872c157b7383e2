"""Sequences that begin alike compute their common prefix once, and get what they would have got alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_config
from tetrad import EngineArgs, LLMEngine, SamplingParams
from tetrad.frontend.outputs import RequestOutput

PREFIX_LENGTHS = [64, 255, 256, 257, 515]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = dataclasses.replace(tiny_config("flash", hca_ratio=128, vocab_size=256), max_position_embeddings=2048)
    (path / "config.json").write_text(json.dumps(config.to_native_dict()))
    return path


def engine(folder: Path, **options) -> LLMEngine:
    built = LLMEngine(
        EngineArgs(
            model=str(folder),
            load_format="dummy",
            device="cpu",
            kv_cache_dtype="fp8",
            index_cache_dtype="fp4",
            max_num_batched_tokens=200,
            **{"max_num_seqs": 8, "max_model_len": 1024} | options,
        )
    )
    built.runner.pools.poison()
    return built


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(2, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(built: LLMEngine) -> tuple[dict[str, RequestOutput], int]:
    outputs, computed = {}, 0
    execute = built.runner.execute

    def counting(plan):
        nonlocal computed
        computed += plan.rows
        return execute(plan)

    built.runner.execute = counting  # type: ignore[method-assign]
    while built.has_unfinished_requests:
        for output in built.step():
            if output.finished:
                outputs[output.request_id] = output
    built.runner.execute = execute  # type: ignore[method-assign]
    return outputs, computed


def assert_everything_returned(built: LLMEngine) -> None:
    manager = built.core.scheduler.manager
    for pool in (manager.blocks, manager.requests):
        assert pool.free_count == pool.size
    assert not built.requests


@pytest.mark.parametrize("length", PREFIX_LENGTHS)
def test_prompts_with_a_common_beginning(folder, length):
    """Five questions about one document: the document is computed once, the tokens are those of each alone."""
    prefix = tokens(length, seed=length)
    prompts = [[*prefix, place, *tokens(3 + place, seed=place)] for place in range(5)]
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=4, ignore_eos=True)
    alone = engine(folder)
    expected = []
    for prompt in prompts:
        alone.add_request(prompt, params)
        expected += [output.outputs[0].token_ids for output in run(alone)[0].values()]
    shared = engine(folder)
    ids = shared.add_requests(prompts, params)
    outputs, computed = run(shared)
    assert [outputs[name].outputs[0].token_ids for name in ids] == expected
    assert computed == length + sum(len(prompt) - length + 5 for prompt in prompts)
    assert_everything_returned(shared)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_choices_compute_their_prompt_once(folder, max_num_seqs):
    """n choices: with one place at a time each computes the prompt for itself, otherwise it is computed once."""
    prompt = tokens(130, seed=1)
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=9, n=3, ignore_eos=True)
    built = engine(folder, max_num_seqs=max_num_seqs)
    built.add_request(prompt, params)
    outputs, computed = run(built)
    got = [choice.token_ids for output in outputs.values() for choice in output.outputs]
    wide = engine(folder)
    wide.add_request(prompt, params)
    assert got == [choice.token_ids for output in run(wide)[0].values() for choice in output.outputs]
    assert len({tuple(ids) for ids in got}) == 3
    assert computed == (3 * 133 if max_num_seqs == 1 else 129 + 3 * 4)
    assert_everything_returned(built)


def test_too_few_blocks_for_prefix_and_forks(folder):
    """A prefix once held the blocks that its own fork waited for, and the engine stepped forever without a token."""
    prompt = tokens(780, seed=2)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=9, n=3, ignore_eos=True)
    built = engine(folder, num_gpu_blocks_override=4, max_model_len=1024)
    built.add_request(prompt, params)
    for _ in range(2000):
        built.step()
        if not built.has_unfinished_requests:
            break
    assert_everything_returned(built)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_frees_what_prefix_and_forks_hold(folder, steps):
    """Aborted while the prefix is waiting, being computed, forked or gone."""
    prefix = tokens(300, seed=3)
    built = engine(folder)
    ids = built.add_requests([[*prefix, place] for place in range(4)], SamplingParams(max_tokens=8, ignore_eos=True))
    for _ in range(steps):
        built.step()
    for name in ids:
        built.abort(name)
    assert not built.has_unfinished_requests
    assert_everything_returned(built)

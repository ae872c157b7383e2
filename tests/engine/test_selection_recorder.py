"""``SelectionRecorder``: one row for each output of a step, and nothing left behind."""

from __future__ import annotations

import pytest
import torch

from tests.engine.small import greedy, random_ids, small_engine
from tetrad import SelectionRecorder
from tetrad.geometry import CSA_RATIO


def test_rows_are_those_of_the_outputs(folder):
    """A row that belonged to another request would be a wrong finding that nothing contradicts."""
    lengths = (37, 9, 90, 5)
    prompts = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    engine = small_engine(folder, max_num_batched_tokens=64)
    ids = [engine.add_request(prompt, greedy(max_tokens=2, ignore_eos=True)) for prompt in prompts]
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in ids}
    with SelectionRecorder(engine) as recorder:
        assert recorder.chosen == {}
        while engine.has_unfinished_requests:
            outputs = engine.step()
            assert list(recorder.chosen) == [1]
            assert recorder.chosen[1].shape == (len(outputs), engine.config.model.index_topk)
            assert recorder.chosen[1].dtype == torch.int32
            for row, output in enumerate(outputs):
                seen[output.request_id].append(recorder.chosen[1][row])
    for name, prompt in zip(ids, prompts, strict=True):
        alone = small_engine(folder)
        alone.add_request(prompt, greedy(max_tokens=2, ignore_eos=True))
        with SelectionRecorder(alone) as recorder:
            for drawn, row in enumerate(seen[name]):
                while not alone.step():
                    pass
                assert set(row.tolist()) == set(recorder.chosen[1][0].tolist()), (name, drawn)
                visible = (len(prompt) + drawn) // CSA_RATIO
                assert int((row >= 0).sum()) == min(visible, 4)


def test_a_closed_recorder_records_no_more(folder):
    engine = small_engine(folder)
    with SelectionRecorder(engine) as recorder:
        pass
    engine.add_request(random_ids(20, 1), greedy(max_tokens=1))
    engine.step()
    assert recorder.chosen == {}


@pytest.mark.parametrize("engine", [5, None, "bundled"])
def test_what_is_no_engine_is_refused_at_once(engine):
    """An ``LLM`` in its place once failed when the recorder was opened, with a missing attribute ``config``."""
    with pytest.raises(TypeError, match=r"takes an LLMEngine, not .*llm\.engine"):
        SelectionRecorder(engine)

"""The sampler's view of a request: what was drawn counts for its penalties, before and after a preemption."""

from __future__ import annotations

import pytest
import torch

from tests.engine.small import VOCABULARY, greedy, replace_logits, run, small_engine


@pytest.mark.parametrize("preempted_after", [None, 1, 2, 3])
def test_what_was_drawn_is_penalised(folder, preempted_after):
    """Each draw costs a token 2 of its lead of 1: two tokens take turns. Nothing noticed a sampler without a past."""
    logits = torch.zeros(VOCABULARY)
    logits[10], logits[11] = 9.0, 8.0
    engine = small_engine(folder)
    replace_logits(engine, lambda _sequence: logits)
    engine.add_request([5, 6, 7], greedy(frequency_penalty=2.0, max_tokens=6, ignore_eos=True), "it")
    for _ in range(preempted_after or 0):
        engine.step()
    if preempted_after:
        engine.core.scheduler.restart()
    assert run(engine)["it"].outputs[0].token_ids == [10, 11, 10, 11, 10, 11]

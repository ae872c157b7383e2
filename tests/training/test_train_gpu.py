"""From a seed to a model that recalls, on a GPU in about a minute."""

from pathlib import Path

import pytest
import torch
from evaluate import recall
from train import parse, run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.timeout(300)
def test_training_from_the_seed_to_recall(tmp_path: Path) -> None:
    """Every part has to learn: with a broken kernel's gradient recall stays near zero."""
    options = ["--recipe", "short", "--muon", "--graphs", "--workers", "8", "--out", str(tmp_path)]
    model = run(parse(options))
    outcomes = recall(model, 2048, 128, index_format="fp4")
    assert sum(outcome.right for outcome in outcomes) >= 0.8 * len(outcomes)

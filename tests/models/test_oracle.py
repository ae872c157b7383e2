"""The model against transformers' DeepseekV4ForCausalLM: fp32, fp32 caches, the Hadamard rotation on (it cancels)."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from tests.session import Session
from tests.tiny import hf_model, tiny_config

from tetrad.models.checkpoint.reader import load_checkpoint
from tetrad.models.config import ModelConfig
from tetrad.models.deepseek_v4 import DeepseekV4

TOLERANCE = 1e-4
CONFIGS = {
    "flash-small-ratios": lambda: tiny_config("flash"),
    "pro-small-ratios": lambda: tiny_config("pro"),
    "flash-real-ratios": lambda: tiny_config("flash", hca_ratio=128, sliding_window=128, index_topk=16),
    "pro-real-ratios": lambda: tiny_config("pro", hca_ratio=128, sliding_window=128, index_topk=16),
}
LENGTH = {"small": 205, "real": 517}


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory):
    @functools.cache
    def build(name: str) -> tuple[ModelConfig, DeepseekV4, list[int], torch.Tensor]:
        config = CONFIGS[name]()
        reference = hf_model(config, seed=3)
        folder = Path(tmp_path_factory.mktemp(name))
        reference.save_pretrained(folder)
        model = DeepseekV4(config, torch.float32)
        load_checkpoint(folder, config, model, device=torch.device("cpu"))
        length = LENGTH["real" if "real" in name else "small"]
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, config.vocab_size, (1, length), generator=generator)
        with torch.no_grad():
            logits = reference(tokens).logits[0]
        return config, model, tokens[0].tolist(), logits

    return build


def check(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.shape == expected.shape
    difference = (logits - expected).abs().amax(-1)
    worst = int(difference.argmax())
    assert difference[worst] <= TOLERANCE, f"position {worst} is off by {difference[worst]:.2e}"


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill(oracle, name):
    """One prefill of the whole prompt gives the oracle's logits at every position."""
    _, model, tokens, expected = oracle(name)
    check(Session(model).run("a", tokens, [len(tokens)])[0], expected)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 64, 127, 128, 129, 256, 300])
@pytest.mark.parametrize("name", CONFIGS)
def test_chunks(oracle, name, chunk):
    """Any chunking gives the same: compressor state, window and emission must carry over at every residue."""
    _, model, tokens, expected = oracle(name)
    if chunk == 1 and "real" in name:
        tokens, expected = tokens[:261], expected[:261]
    check(Session(model).run("a", tokens, [chunk])[0], expected)


@pytest.mark.parametrize("prefill", [1, 7, 128, 131, 192])
@pytest.mark.parametrize("name", ["flash-small-ratios", "pro-small-ratios"])
def test_prefill_then_decode(oracle, name, prefill):
    """A prefill, then token by token."""
    _, model, tokens, expected = oracle(name)
    check(Session(model).run("a", tokens, [prefill, 1])[0], expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_selection_matters(oracle, name):
    """With every entry selected the logits differ: otherwise the tests above would not test the indexer."""
    config, model, tokens, expected = oracle(name)
    wide = DeepseekV4(dataclasses.replace(config, index_topk=512), torch.float32)
    wide.load_state_dict(model.state_dict())
    logits = Session(wide).run("a", tokens, [len(tokens)])[0]
    assert (logits - expected).abs().max() > 10 * TOLERANCE

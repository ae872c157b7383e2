"""The quickest comparison with transformers' DeepseekV4ForCausalLM that still sees every mistake of ``mutants``.

``python -m tests.oracle_subset FOLDER`` asks transformers once and stores two tiny checkpoints and their logits;
``CHECKS`` then compare the model with them, without transformers. The models differ from the released ones where that
makes a mistake visible: epsilons so large that leaving one out shows, so few Sinkhorn rounds that one more shows, an
index_topk so small that the choice matters.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.session import Session
from tests.tiny import hf_model, tiny_config
from tetrad.models.checkpoint.reader import load_checkpoint
from tetrad.models.config import ModelConfig
from tetrad.models.deepseek_v4 import DeepseekV4

TOLERANCE = 1e-4
LENGTH = 45
# 7 and 5 rows go into the window's ring, 11 are a chunk, which wraps the rings of 16. Every step size from here on is
# 1: each residue of both ratios is met by a decode step
CHUNKS = [7, 11, 5, 5, 1]

_DIFFERENCES = {"index_topk": 4, "hc_eps": 0.03, "rms_norm_eps": 0.02, "hc_sinkhorn_iters": 2}
CONFIGS: dict[str, Callable[[], ModelConfig]] = {
    "flash": lambda: tiny_config("flash", num_hidden_layers=3, compress_ratios=(0, 4, 16), **_DIFFERENCES),
    "pro": lambda: tiny_config("pro", num_hidden_layers=2, compress_ratios=(16, 4), **_DIFFERENCES),
}


def write(folder: Path) -> None:
    """Ask the oracle: a checkpoint as transformers saves it, tokens and logits of every configuration."""
    for name, config in CONFIGS.items():
        oracle = hf_model(config(), seed=3)
        oracle.save_pretrained(folder / name)
        tokens = torch.randint(0, oracle.config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.save((tokens[0].tolist(), oracle(tokens).logits[0]), folder / f"{name}.pt")


@functools.cache
def _load(folder: Path, name: str) -> tuple[DeepseekV4, list[int], Tensor]:
    config = CONFIGS[name]()
    model = DeepseekV4(config, torch.float32)
    load_checkpoint(folder / name, config, model)
    return model, *torch.load(folder / f"{name}.pt")


def _compare(folder: Path, name: str, chunks: list[int]) -> None:
    model, tokens, expected = _load(folder, name)
    logits = Session(model, max_len=256, max_seqs=1).run("a", tokens, chunks)[0]
    difference = (logits - expected).abs().amax(-1)
    wrong = (~(difference <= TOLERANCE)).nonzero().flatten().tolist()  # NaN is wrong as well
    first = f"first position {wrong[0]}, the worst by {difference.max():.1e}" if wrong else ""
    assert not wrong, f"{name}: {len(wrong)} of {LENGTH} positions are off, {first}"


def check_flash_prefill(folder: Path) -> None:
    """SWA, CSA, HCA; one prefill."""
    _compare(folder, "flash", [LENGTH])


def check_pro_prefill(folder: Path) -> None:
    """HCA, CSA; one prefill."""
    _compare(folder, "pro", [LENGTH])


def check_flash_chunks(folder: Path) -> None:
    """A short prefill, a chunk of 11, two of 5, then token by token."""
    _compare(folder, "flash", CHUNKS)


def check_pro_chunks(folder: Path) -> None:
    """The same with the HCA layer first."""
    _compare(folder, "pro", CHUNKS)


# the quickest first: most mistakes show in the first
CHECKS = (check_flash_prefill, check_pro_prefill, check_flash_chunks, check_pro_chunks)

if __name__ == "__main__":
    torch.set_num_threads(1)
    write(Path(sys.argv[1]))

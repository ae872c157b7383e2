"""The bytes of weights, against real tensors and real files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.released import flash_document, pro_document
from tests.tiny import tiny_config

from tetrad.models.checkpoint import TensorKind, dummy_state, expected_tensors, weight_bytes, write_checkpoint
from tetrad.models.config import ModelConfig
from tetrad.models.deepseek_v4 import DeepseekV4

ODD = {"hidden_size": 160, "q_lora_rank": 131, "o_lora_rank": 37, "vocab_size": 67, "n_routed_experts": 3}


@pytest.mark.parametrize("kind", ["flash", "pro", "swa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_bytes_are_those_of_the_model(kind: str, dtype: torch.dtype):
    """A part whose dtype changes in the model would make the arithmetic promise memory that is not there."""
    config = tiny_config(kind, num_hash_layers=2, **ODD)
    with torch.device("meta"):
        model = DeepseekV4(config, dtype)
    held = weight_bytes(config, dtype)
    assert held.held == sum(parameter.nbytes for parameter in model.parameters())
    routed = [spec for spec in expected_tensors(config).values() if spec.kind is TensorKind.EXPERT]
    assert held.held_experts == sum(spec.shape[0] * spec.shape[1] for spec in routed) * dtype.itemsize


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8", None])
@pytest.mark.parametrize("torch_dtype", ["float32", "bfloat16"])
def test_stored_bytes_are_those_of_the_files(expert_dtype: str | None, torch_dtype: str, tmp_path: Path):
    config = tiny_config("flash", expert_dtype=expert_dtype, torch_dtype=torch_dtype, **ODD)
    written = write_checkpoint(tmp_path / "m", config, dummy_state(config), quantized=expert_dtype is not None)
    files = [load_file(path) for path in (tmp_path / "m").glob("*.safetensors")]
    assert weight_bytes(written, torch.float32).stored == sum(
        tensor.nbytes for state in files for tensor in state.values()
    )


@pytest.mark.parametrize(
    ("document", "stored", "held"), [(flash_document(), 156.0e9, 570.5e9), (pro_document(), 850.7e9, 3150.0e9)]
)
def test_the_released_models(document: dict, stored: float, held: float):
    """The files of Flash are published as 159.6 GB, of which 3.6 are the prediction layer's."""
    weights = weight_bytes(ModelConfig.from_dict(document), torch.bfloat16)
    assert weights.stored == pytest.approx(stored, rel=1e-3)
    assert weights.held == pytest.approx(held, rel=1e-3)

"""expected_tensors against the published facts of the released checkpoints and against transformers' own module."""

from __future__ import annotations

import math

import pytest
from tests.released import flash_document, pro_document
from tests.tiny import hf_model, tiny_config

from tetrad.models.checkpoint import TensorKind, expected_tensors
from tetrad.models.checkpoint.names import native_parts
from tetrad.models.checkpoint.reader import infer_tile
from tetrad.models.checkpoint.tensors import parameter_name, scale_name
from tetrad.models.config import ModelConfig


def test_flash_counts_and_bytes():
    """69,187 tensors are published, of which 1,575 are the prediction layer's; 156.0 GB without it."""
    specs = expected_tensors(ModelConfig.from_dict(flash_document()))
    assert sum(1 + spec.has_scale for spec in specs.values()) == 69_187 - 1_575
    size = 0.0
    for spec in specs.values():
        count = math.prod(spec.shape)
        per_value = {"linear": 1 + 1 / 128**2, "expert": 0.5 + 1 / 32, "bf16": 2, "f32": 4, "i64": 8}[spec.kind.value]
        size += count * per_value
    assert size / 1e9 == pytest.approx(156.0, abs=0.05)


@pytest.mark.parametrize(
    ("document", "billions"), [(flash_document(), 284), (pro_document(), 1_600)], ids=["flash", "pro"]
)
def test_parameters_of_the_released_models(document: dict, billions: int):
    specs = expected_tensors(ModelConfig.from_dict(document))
    total = sum(math.prod(spec.shape) for spec in specs.values() if spec.kind is not TensorKind.I64)
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


FLASH_SHAPES = {
    "embed.weight": (129280, 4096),
    "hc_head_fn": (4, 16384),
    "hc_head_scale": (1,),
    "layers.0.hc_attn_fn": (24, 16384),
    "layers.0.hc_ffn_scale": (3,),
    "layers.0.attn.wq_a.weight": (1024, 4096),
    "layers.0.attn.wq_b.weight": (32768, 1024),
    "layers.0.attn.wkv.weight": (512, 4096),
    "layers.0.attn.wo_a.weight": (8192, 4096),
    "layers.0.attn.wo_b.weight": (4096, 8192),
    "layers.0.attn.attn_sink": (64,),
    "layers.2.attn.compressor.wkv.weight": (1024, 4096),
    "layers.2.attn.compressor.ape": (4, 1024),
    "layers.2.attn.compressor.norm.weight": (512,),
    "layers.3.attn.compressor.wgate.weight": (512, 4096),
    "layers.3.attn.compressor.ape": (128, 512),
    "layers.2.attn.indexer.wq_b.weight": (8192, 1024),
    "layers.2.attn.indexer.weights_proj.weight": (64, 4096),
    "layers.2.attn.indexer.compressor.wkv.weight": (256, 4096),
    "layers.2.attn.indexer.compressor.ape": (4, 256),
    "layers.2.attn.indexer.compressor.norm.weight": (128,),
    "layers.2.ffn.gate.tid2eid": (129280, 6),
    "layers.3.ffn.gate.bias": (256,),
    "layers.42.ffn.experts.255.w1.weight": (2048, 4096),
    "layers.42.ffn.experts.255.w2.weight": (4096, 2048),
    "layers.42.ffn.shared_experts.w3.weight": (2048, 4096),
}


def test_flash_shapes():
    specs = expected_tensors(ModelConfig.from_dict(flash_document()))
    assert {name: specs[name].shape for name in FLASH_SHAPES} == FLASH_SHAPES
    for name in ("layers.0.attn.compressor.ape", "layers.3.attn.indexer.wq_b.weight", "layers.3.ffn.gate.tid2eid"):
        assert name not in specs
    assert "layers.2.ffn.gate.bias" not in specs


@pytest.mark.parametrize("kind", ["flash", "pro"])
def test_the_modules_of_transformers_have_the_same_tensors(kind: str):
    config = tiny_config(kind, hca_ratio=128, num_hash_layers=2)
    theirs = {}
    for name, tensor in hf_model(config).state_dict().items():
        for part in native_parts(name, tensor.shape):
            theirs[part.native] = tuple(
                tensor.shape if part.expert is None else (part.stop - part.start, tensor.shape[2])
            )
    assert theirs == {name: spec.shape for name, spec in expected_tensors(config).items()}


def test_parameter_and_scale_names():
    assert parameter_name("layers.3.ffn.experts.17.w2.weight") == ("layers.3.ffn.experts.w2", 17)
    assert parameter_name("layers.3.ffn.shared_experts.w2.weight") == ("layers.3.ffn.shared_experts.w2.weight", None)
    assert parameter_name("layers.3.attn.attn_sink") == ("layers.3.attn.attn_sink", None)
    assert scale_name("layers.3.ffn.experts.17.w2.weight") == "layers.3.ffn.experts.17.w2.scale"


@pytest.mark.parametrize(
    ("shape", "grid", "tile"),
    [
        ((256, 384), (2, 3), (128, 128)),
        ((200, 130), (2, 2), (128, 128)),  # not 100 and 65
        ((64, 64), (1, 1), (128, 128)),
        ((64, 64), (2, 2), (32, 32)),
        ((64, 4096), (64, 32), (1, 128)),
        ((60, 90), (2, 3), (32, 32)),
        ((60, 60), (5, 6), (12, 10)),
        ((60, 60), (7, 1), None),
        ((60, 60), (0, 1), None),
        ((60, 60), (60,), None),
    ],
)
def test_tile_sizes(shape: tuple[int, ...], grid: tuple[int, ...], tile: tuple[int, int] | None):
    assert infer_tile(shape, grid) == tile

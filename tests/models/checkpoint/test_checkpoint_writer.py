"""What write_checkpoint puts into a folder, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.tiny import tiny_config

from tetrad.errors import CheckpointError, ConfigError
from tetrad.models.checkpoint import dummy_state, expected_tensors, write_checkpoint, writer
from tetrad.models.config import ModelConfig

CONFIG = tiny_config("flash", expert_dtype="fp4", n_routed_experts=3)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return dummy_state(CONFIG, 0)


def headers(folder: Path) -> dict[str, tuple[str, str, list[int]]]:
    """Tensor name -> file, dtype, shape."""
    result = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                piece = file.get_slice(name)
                result[name] = (path.name, piece.get_dtype(), piece.get_shape())
    return result


def test_stored_dtypes_are_those_of_the_release(state: dict[str, torch.Tensor], tmp_path: Path):
    write_checkpoint(tmp_path / "model", CONFIG, state)
    stored = {name: tuple(header[1:]) for name, header in headers(tmp_path / "model").items()}
    expected = {
        "embed.weight": ("BF16", [512, 128]),
        "norm.weight": ("BF16", [128]),
        "hc_head_fn": ("F32", [4, 512]),
        "layers.1.attn.attn_sink": ("F32", [4]),
        "layers.1.attn.wq_b.weight": ("F8_E4M3", [256, 64]),
        "layers.1.attn.wq_b.scale": ("F8_E8M0", [2, 1]),
        "layers.1.attn.wo_a.weight": ("F8_E4M3", [64, 128]),
        "layers.1.attn.compressor.wkv.weight": ("BF16", [128, 128]),
        "layers.1.attn.compressor.ape": ("F32", [4, 128]),
        "layers.1.attn.indexer.wq_b.scale": ("F8_E8M0", [16, 1]),
        "layers.1.attn.indexer.weights_proj.weight": ("BF16", [32, 128]),
        "layers.0.ffn.gate.tid2eid": ("I64", [512, 2]),
        "layers.1.ffn.gate.bias": ("F32", [3]),
        "layers.1.ffn.gate.weight": ("BF16", [3, 128]),
        "layers.1.ffn.experts.2.w1.weight": ("I8", [64, 64]),
        "layers.1.ffn.experts.2.w1.scale": ("F8_E8M0", [64, 4]),
        "layers.1.ffn.experts.2.w2.weight": ("I8", [128, 32]),
        "layers.1.ffn.shared_experts.w2.weight": ("F8_E4M3", [128, 64]),
    }
    assert {name: stored[name] for name in expected} == expected
    specs = expected_tensors(CONFIG)
    assert len(stored) == sum(1 + spec.has_scale for spec in specs.values())


def test_shards_and_index(state: dict[str, torch.Tensor], tmp_path: Path):
    write_checkpoint(tmp_path / "model", CONFIG, state, shard_bytes=150_000)
    folder = tmp_path / "model"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored = headers(folder)
    assert index["weight_map"] == {name: file for name, (file, _, _) in stored.items()}
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    data = 0
    for file in files:
        raw = (folder / file).read_bytes()
        payload = len(raw) - 8 - int.from_bytes(raw[:8], "little")
        assert payload <= 150_000
        data += payload
    assert index["metadata"]["total_size"] == data
    for name, (file, _, _) in stored.items():
        if name.endswith(".scale"):
            assert stored[name.removesuffix("scale") + "weight"][0] == file


def test_quantisation_is_written_into_the_configuration(state: dict[str, torch.Tensor], tmp_path: Path):
    write_checkpoint(tmp_path / "a", CONFIG, state)
    document = json.loads((tmp_path / "a" / "config.json").read_text())
    assert document["quantization_config"]["weight_block_size"] == [128, 128]
    assert document["quantization_config"]["scale_fmt"] == "ue8m0"
    assert document["expert_dtype"] == "fp4"
    write_checkpoint(tmp_path / "b", CONFIG, state, quantized=False)
    document = json.loads((tmp_path / "b" / "config.json").read_text())
    assert "quantization_config" not in document
    assert "expert_dtype" not in document


def test_bad_states_are_refused_and_leave_nothing(state: dict[str, torch.Tensor], tmp_path: Path):
    wrong = dict(state) | {
        "surplus": torch.ones(1),
        "head.weight": torch.ones(3, 3),
        "hc_head_fn": torch.ones(4, 512).int(),
    }
    del wrong["norm.weight"]
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "model", CONFIG, wrong)
    text = str(caught.value)
    for part in ("missing: norm.weight", "unexpected: surplus", "head.weight is [3, 3]", "hc_head_fn is torch.int32"):
        assert part in text
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_middle_leaves_nothing(
    state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder with some of its shards would look like a checkpoint."""
    saved = []

    def fails(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        saved.append(path)
        path.write_bytes(b"partial")
        if len(saved) == 3:
            raise OSError("no space left on device")

    monkeypatch.setattr(writer, "save_file", fails)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "keep").write_text("me")
    for name, overwrite in (("model", False), ("old", True)):
        saved.clear()
        with pytest.raises(OSError, match="no space left"):
            write_checkpoint(tmp_path / name, CONFIG, state, shard_bytes=150_000, overwrite=overwrite)
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "keep"]


def test_a_full_folder_is_refused(state: dict[str, torch.Tensor], tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "keep").write_text("me")
    with pytest.raises(CheckpointError, match="it is not empty; name another or ask to overwrite"):
        write_checkpoint(tmp_path / "model", CONFIG, state)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "keep"]
    write_checkpoint(tmp_path / "model", CONFIG, state, overwrite=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model", "model.safetensors"]


def test_an_empty_folder_is_filled(state: dict[str, torch.Tensor], tmp_path: Path):
    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", CONFIG, state)
    assert ModelConfig.from_pretrained(tmp_path / "model").quantized


def test_impossible_targets(state: dict[str, torch.Tensor], tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="it is a file; name a folder"):
        write_checkpoint(tmp_path / "file", CONFIG, state)
    with pytest.raises(CheckpointError, match="is not a folder; create it first"):
        write_checkpoint(tmp_path / "absent" / "model", CONFIG, state)


def test_fp4_needs_groups_of_32():
    with pytest.raises(ConfigError, match="moe_intermediate_size: is 72, must be a multiple of 32"):
        tiny_config("swa", expert_dtype="fp4", moe_intermediate_size=72)

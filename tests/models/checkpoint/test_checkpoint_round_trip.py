"""A checkpoint written by one side and read by the other: tetrad, transformers, and a numpy decoder of the formats."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.checkpoint.stand_in import StandIn, assert_same, decode_folder
from tests.tiny import hf_model, tiny_config

from tetrad.formats import fp8
from tetrad.models.checkpoint import TensorKind, dummy_state, expected_tensors, load_checkpoint, write_checkpoint
from tetrad.models.checkpoint.names import native_parts
from tetrad.models.config import ModelConfig

# sizes that are no multiple of a tile, so that tiles at the edges are short
ODD = {
    "hidden_size": 160,
    "q_lora_rank": 131,
    "o_lora_rank": 37,
    "head_dim": 48,
    "num_attention_heads": 6,
    "o_groups": 3,
    "moe_intermediate_size": 224,
    "vocab_size": 67,
    "n_routed_experts": 3,
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    config = ModelConfig.from_pretrained(folder)
    module = StandIn(config, dtype)
    load_checkpoint(folder, config, module)
    return module.values()


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of a transformers model by native names."""
    result = {}
    for name, tensor in model.state_dict().items():
        for part in native_parts(name, tensor.shape):
            result[part.native] = tensor if part.expert is None else tensor[part.expert, part.start : part.stop]
    return result


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [2**40, 100_000], ids=["one-file", "shards"])
def test_native_against_the_definition(expert_dtype: str, dtype: torch.dtype, shard_bytes: int, tmp_path: Path):
    config = tiny_config("flash", expert_dtype=expert_dtype, **ODD)
    state = dummy_state(config, 1)
    written = write_checkpoint(tmp_path / "model", config, state, shard_bytes=shard_bytes)
    assert written == ModelConfig.from_pretrained(tmp_path / "model")
    assert (written.quantized, written.expert_dtype) == (True, expert_dtype)
    expected = decode_folder(tmp_path / "model")
    assert_same(load(tmp_path / "model", dtype), expected)
    for name, values in expected.items():  # and the decoder reads the weights that were meant
        error = (values.double() - state[name].double()).norm() / state[name].double().norm()
        assert error < (0.12 if ".experts." in name and expert_dtype == "fp4" else 0.04), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unquantised(dtype: str, tmp_path: Path):
    config = tiny_config("pro", torch_dtype=dtype, expert_dtype="fp4", **ODD)
    state = dummy_state(config, 2)
    written = write_checkpoint(tmp_path / "model", config, state, quantized=False)
    assert (written.quantized, written.expert_dtype) == (False, None)
    kinds = {name: spec.kind for name, spec in expected_tensors(config).items()}
    plain = getattr(torch, dtype)
    kept = (TensorKind.F32, TensorKind.I64)
    expected = {name: values if kinds[name] in kept else values.to(plain) for name, values in state.items()}
    assert_same(load(tmp_path / "model"), expected)


@pytest.mark.parametrize("kind", ["flash", "pro"])
@pytest.mark.parametrize("hca_ratio", [16, 128])
@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_the_same(kind: str, hca_ratio: int, expert_dtype: str, dtype: torch.dtype, tmp_path: Path):
    """Ours is the only writer of this format here; if transformers reads other values, released files would fail."""
    from transformers import DeepseekV4ForCausalLM

    # transformers wants whole tiles; 256 makes several of them along both sides
    config = tiny_config(kind, hca_ratio=hca_ratio, expert_dtype=expert_dtype, hidden_size=256, n_routed_experts=3)
    write_checkpoint(tmp_path / "model", config, dummy_state(config, 3), shard_bytes=300_000)
    theirs, info = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    assert_same(values_of(theirs), load(tmp_path / "model", dtype))


@pytest.mark.parametrize("kind", ["flash", "pro"])
def test_what_transformers_saves(kind: str, tmp_path: Path):
    config = tiny_config(kind, num_hash_layers=2)
    model = hf_model(config, seed=4)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert ModelConfig.from_pretrained(tmp_path) == config
    names = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert {"head.weight", "model.embed_tokens.weight", "model.layers.0.attn.norm.weight"} <= names
    assert_same(load(tmp_path), values_of(model))


def test_module_names_of_transformers(tmp_path: Path):
    """A plain state dict of the transformers model, experts stacked."""
    config = tiny_config("flash")
    model = hf_model(config, seed=5)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "model.safetensors")
    module = StandIn(config)
    load_checkpoint(tmp_path, config, module)
    assert_same(module.values(), values_of(model))


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32, torch.bfloat16])
def test_module_names_with_scales(scale_dtype: torch.dtype, tmp_path: Path):
    """FP8 under transformers' names: .weight_scale_inv, stacks with a scale of their own, scales of any size."""
    config = tiny_config("flash", hidden_size=256, moe_intermediate_size=256)
    state: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    kinds = {name: spec.kind for name, spec in expected_tensors(config).items()}
    for name, tensor in hf_model(config, seed=6).state_dict().items():
        parts = native_parts(name, tensor.shape)
        if kinds[parts[0].native] in (TensorKind.LINEAR, TensorKind.EXPERT):
            codes, scale_bytes = fp8.quantize_blocks(tensor)
            scales = scale_bytes.view(torch.float8_e8m0fnu).float()
            if scale_dtype != torch.float8_e8m0fnu:
                scales = scales * (0.5 + torch.rand(scales.shape, generator=generator))
            scales = scales.to(scale_dtype)
            state[name] = codes
            suffix = "_scale_inv"
            state[name + suffix] = scales
            grid = scales.float().repeat_interleave(128, -1).repeat_interleave(128, -2)
            tensor = codes.float() * grid[..., : codes.shape[-2], : codes.shape[-1]]
        else:
            state[name] = tensor.contiguous()
        for part in parts:
            expected[part.native] = tensor if part.expert is None else tensor[part.expert, part.start : part.stop]
    save_file(state, tmp_path / "model.safetensors")
    module = StandIn(config)
    load_checkpoint(tmp_path, config, module)
    assert_same(module.values(), expected)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp4_with_float_scales(scale_dtype: torch.dtype, tmp_path: Path):
    config = tiny_config("swa", expert_dtype="fp4")
    write_checkpoint(tmp_path / "model", config, dummy_state(config, 7))
    path = tmp_path / "model" / "model.safetensors"
    state = load_file(path)
    expected = decode_folder(tmp_path / "model")
    for name in [name for name in state if name.endswith(".scale") and ".experts." in name]:
        state[name] = (state[name].float() * 1.5).to(scale_dtype)
        weight = name.removesuffix("scale") + "weight"
        expected[weight] = expected[weight] * 1.5
    save_file(state, path)
    assert_same(load(tmp_path / "model"), expected)


def test_fp4_in_torchs_own_dtype(tmp_path: Path):
    """The packed bytes are the same in every dtype of one byte, yet float4_e2m1fn_x2 was refused; so were U8 scales."""
    config = tiny_config("swa", expert_dtype="fp4")
    write_checkpoint(tmp_path / "model", config, dummy_state(config, 7))
    path = tmp_path / "model" / "model.safetensors"
    state = load_file(path)
    expected = decode_folder(tmp_path / "model")
    for name in [name for name in state if ".ffn.experts." in name]:
        dtype = torch.uint8 if name.endswith("scale") else torch.float4_e2m1fn_x2
        state[name] = state[name].view(dtype)
    save_file(state, path)
    assert_same(load(tmp_path / "model"), expected)


def test_stacked_fp4_in_torchs_own_dtype(tmp_path: Path):
    """safetensors gives no slices of that dtype, and a stack of experts is read one by one."""
    config = tiny_config("swa", expert_dtype="fp4")
    write_checkpoint(tmp_path / "model", config, dummy_state(config, 7))
    path = tmp_path / "model" / "model.safetensors"
    state = load_file(path)
    expected = decode_folder(tmp_path / "model")
    for layer in range(config.num_hidden_layers):
        experts = f"layers.{layer}.ffn.experts"
        for stack, weights in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            for suffix, end, dtype in (
                ("weight", "", torch.float4_e2m1fn_x2),
                ("scale", "_scale_inv", torch.float8_e8m0fnu),
            ):
                parts = [
                    torch.cat(
                        [state.pop(f"{experts}.{expert}.{weight}.{suffix}").view(torch.uint8) for weight in weights]
                    )
                    for expert in range(config.n_routed_experts)
                ]
                state[f"model.layers.{layer}.mlp.experts.{stack}{end}"] = torch.stack(parts).view(dtype)
    save_file(state, path)
    assert_same(load(tmp_path / "model"), expected)


@pytest.mark.parametrize("stale", ["older", "cut", "of this very file"])
def test_a_complete_index_wins_over_a_single_file(stale: str, tmp_path: Path):
    """A stale or partial model.safetensors beside the shards was read in their place."""
    config = tiny_config("swa")
    folder = tmp_path / "model"
    write_checkpoint(folder, config, dummy_state(config, 12), shard_bytes=100_000)
    expected = decode_folder(folder)
    if stale == "older":
        save_file({"norm.weight": torch.zeros(3)}, folder / "model.safetensors")
    elif stale == "cut":
        (folder / "model.safetensors").write_bytes(b"123")
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        state = {
            name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()
        }
        save_file(state, folder / "model.safetensors")
        index["weight_map"] = dict.fromkeys(index["weight_map"], "model.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(load(folder), expected)


def test_a_single_file_wins_over_an_index_without_its_files(tmp_path: Path):
    """The shards were merged into one file or deleted; their index says nothing any more."""
    config = tiny_config("swa")
    folder = tmp_path / "model"
    write_checkpoint(folder, config, dummy_state(config, 13), shard_bytes=100_000)
    expected = decode_folder(folder)
    state = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    min(folder.glob("*.safetensors")).unlink()
    save_file(state, folder / "model.safetensors")
    assert_same(load(folder), expected)


def test_prediction_layers_are_skipped(tmp_path: Path):
    config = tiny_config("swa")
    write_checkpoint(tmp_path / "model", config, dummy_state(config, 8))
    path = tmp_path / "model" / "model.safetensors"
    expected = decode_folder(tmp_path / "model")
    save_file(load_file(path) | {"mtp.0.norm.weight": torch.zeros(3), "mtp.0.e_proj.scale": torch.zeros(3)}, path)
    assert_same(load(tmp_path / "model"), expected)


def test_a_state_dict_can_be_written(tmp_path: Path):
    """The experts of a module come stacked."""
    config = tiny_config("flash")
    state = dummy_state(config, 9)
    write_checkpoint(tmp_path / "one", config, state, quantized=False)
    module = StandIn(config)
    load_checkpoint(tmp_path / "one", config, module)
    write_checkpoint(tmp_path / "two", config, module.state_dict(), quantized=False)
    assert_same(load(tmp_path / "two"), state)


def test_other_tile_sizes(tmp_path: Path):
    """The grid of scales tells the tile; the configuration's word is not needed."""
    config = tiny_config("swa", hidden_size=256, q_lora_rank=96)
    state = dummy_state(config, 10)
    write_checkpoint(tmp_path / "model", config, state)
    path = tmp_path / "model" / "model.safetensors"
    stored = load_file(path)
    expected = decode_folder(tmp_path / "model")
    for name, tile in (("layers.0.attn.wq_b", (32, 32)), ("layers.1.ffn.shared_experts.w2", (64, 16))):
        weight = state[f"{name}.weight"]
        stored[f"{name}.weight"], scales = fp8.quantize_blocks(weight, tile)
        stored[f"{name}.scale"] = scales.view(torch.float8_e8m0fnu)
        expected[f"{name}.weight"] = fp8.dequantize_blocks(stored[f"{name}.weight"], scales, tile)
    save_file(stored, path)
    assert_same(load(tmp_path / "model"), expected)


def test_meta_parameters_are_allocated(tmp_path: Path):
    config = dataclasses.replace(tiny_config("flash"), expert_dtype="fp4")
    write_checkpoint(tmp_path / "model", config, dummy_state(config, 11))
    module = StandIn(config, device="meta")
    load_checkpoint(tmp_path / "model", config, module, device="cpu")
    assert all(tensor.device.type == "cpu" for tensor in module.state_dict().values())
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert_same(module.values(), decode_folder(tmp_path / "model"))

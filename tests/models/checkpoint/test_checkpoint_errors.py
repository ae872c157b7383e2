"""Everything that can be wrong with a checkpoint, each with what its error says."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.checkpoint.stand_in import StandIn
from tests.tiny import tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from tetrad.errors import CheckpointError
from tetrad.models.checkpoint import dummy_state, load_checkpoint, write_checkpoint
from tetrad.models.checkpoint.files import CheckpointFiles
from tetrad.models.config import ModelConfig

CONFIG = tiny_config("flash", expert_dtype="fp4", n_routed_experts=3, hidden_size=256, vocab_size=64)
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one file and, beside it, the same in shards."""
    folder = tmp_path_factory.mktemp("good")
    state = dummy_state(CONFIG, 0)
    write_checkpoint(folder / "one", CONFIG, state)
    write_checkpoint(folder / "shards", CONFIG, state, shard_bytes=200_000)
    return folder


def error_of(folder: Path, config: ModelConfig = CONFIG) -> str:
    """The error of loading; the module must not have been touched."""
    module = StandIn(config)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, config, module)
    for name, tensor in module.state_dict().items():
        untouched = tensor.isnan() if tensor.is_floating_point() else tensor == -1
        assert bool(untouched.all()), f"{name} was written although the checkpoint is bad"
    return str(caught.value)


def drop(*names: str) -> Callable[[State], Any]:
    return lambda state: [state.pop(name) for name in names]


def put(name: str, tensor: torch.Tensor) -> Callable[[State], Any]:
    return lambda state: state.update({name: tensor})


def cast(name: str, dtype: torch.dtype) -> Callable[[State], Any]:
    return lambda state: state.update({name: state[name].to(dtype)})


def cut(name: str) -> Callable[[State], Any]:
    return lambda state: state.update({name: state[name][:-1].clone()})


def copy(name: str, other: str) -> Callable[[State], Any]:
    return lambda state: state.update({other: state[name].clone()})


TENSORS: list[tuple[Callable[[State], Any], str]] = [
    (drop("norm.weight"), "1 tensor is missing: norm.weight. Remedy: "),
    (drop("layers.0.attn.attn_sink", "layers.4.ffn.experts.2.w3.weight"), "2 tensors are missing: layers.0.attn.attn"),
    (put("layers.0.attn.bias", torch.ones(1)), "1 tensor is unexpected: layers.0.attn.bias. Remedy: "),
    (
        put("model.layers.5.self_attn.sinks", torch.ones(4)),
        "model.layers.5.self_attn.sinks (= layers.5.attn.attn_sink)",
    ),
    (cut("norm.weight"), "1 tensor has the wrong shape: norm.weight is [255], must be [256]"),
    (cut("layers.0.attn.wq_a.weight"), "layers.0.attn.wq_a.weight is [63, 256], must be [64, 256]"),
    (cut("layers.0.ffn.experts.1.w1.weight"), "layers.0.ffn.experts.1.w1.weight is [63, 128], must be [64, 128]"),
    (cut("layers.0.ffn.gate.tid2eid"), "layers.0.ffn.gate.tid2eid is [63, 2], must be [64, 2]"),
    (cast("norm.weight", torch.int64), "norm.weight is I64, must be one of F32, BF16, F16"),
    (cast("norm.weight", torch.float8_e4m3fn), "norm.weight is F8_E4M3, must be one of F32, BF16, F16"),
    (
        cast("layers.0.attn.wq_a.weight", torch.float8_e5m2),
        "layers.0.attn.wq_a.weight is F8_E5M2, must be one of F8_E4M",
    ),
    (cast("layers.0.ffn.gate.tid2eid", torch.float32), "layers.0.ffn.gate.tid2eid is F32, must be one of I64, I32"),
    (cast("layers.0.attn.wq_a.weight", torch.int8), "layers.0.attn.wq_a.weight is I8, must be one of F8_E4M3"),
    (
        drop("layers.0.attn.wq_a.scale"),
        "1 quantised tensor has no fitting scale: layers.0.attn.wq_a.weight is F8_E4M3 an",
    ),
    (drop("layers.0.ffn.experts.1.w1.scale"), "layers.0.ffn.experts.1.w1.weight is I8 and has no scale"),
    (
        put("layers.0.attn.wq_b.scale", torch.ones(3, 1)),
        "layers.0.attn.wq_b.scale is [3, 1] for a weight of [256, 64], must be a grid of tiles, as 128x128",
    ),
    (put("layers.0.attn.wq_b.scale", torch.ones(())), "layers.0.attn.wq_b.scale is [] for a weight of [256, 64]"),
    (
        put("layers.0.ffn.experts.1.w1.scale", torch.ones(64, 4)),
        "layers.0.ffn.experts.1.w1.scale is [64, 4] for a weight of [64, 256], must be one scale per row and 32 inputs",
    ),
    (
        cast("layers.0.attn.wq_b.scale", torch.int32),
        "layers.0.attn.wq_b.scale is I32, must be one of F8_E8M0, F32, BF16",
    ),
    (
        cast("layers.0.attn.wq_b.weight", torch.bfloat16),
        "1 tensor is unexpected: layers.0.attn.wq_b.scale. Remedy: ",
    ),
    (
        copy("norm.weight", "model.norm.weight"),
        "1 tensor is stored twice: norm.weight (as model.norm.weight and norm.weight). Remedy: keep one",
    ),
    (
        put("layers.0.ffn.gate.tid2eid", torch.full((64, 2), 3)),
        "1 tensor is out of range: layers.0.ffn.gate.tid2eid holds 3 to 3, must be 0 to 2",
    ),
    (
        put("layers.0.ffn.gate.tid2eid", torch.full((64, 2), -1)),
        "layers.0.ffn.gate.tid2eid holds -1 to -1, must be 0 to 2",
    ),
]


@pytest.mark.parametrize(("change", "text"), TENSORS, ids=[text[:50] for _, text in TENSORS])
def test_wrong_tensors(change: Callable[[State], Any], text: str, good: Path, tmp_path: Path):
    state = load_file(good / "one" / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    error = error_of(tmp_path)
    assert text in error
    assert error.count("\n  - ") == 1, "one mistake must be reported once"


def test_one_error_names_everything(good: Path, tmp_path: Path):
    state = load_file(good / "one" / "model.safetensors")
    for change in (
        drop(*[f"layers.{layer}.{norm}_norm.weight" for layer in range(5) for norm in ("attn", "ffn")]),
        drop("norm.weight", "embed.weight"),
        put("surplus", torch.ones(1)),
        cut("head.weight"),
        drop("layers.0.attn.wq_a.scale"),
    ):
        change(state)
    save_file(state, tmp_path / "model.safetensors")
    error = error_of(tmp_path)
    assert error.startswith(f"the checkpoint {tmp_path} cannot be used:")
    assert "12 tensors are missing: embed.weight, norm.weight, " in error
    assert " and 2 more. Remedy: the checkpoint is incomplete, or config.json" in error
    assert len(re.findall(r"layers\.\d\.(?:attn|ffn)_norm", error)) == 8
    for text in ("surplus", "head.weight is [63, 256]", "layers.0.attn.wq_a.weight is F8_E4M3 and has no scale"):
        assert text in error


def test_another_models_configuration(good: Path):
    deeper = tiny_config(
        "flash",
        expert_dtype="fp4",
        n_routed_experts=3,
        hidden_size=256,
        vocab_size=64,
        num_hidden_layers=6,
        compress_ratios=(0, 4, 16, 4, 16, 4),
        num_hash_layers=2,
    )
    error = error_of(good / "one", deeper)
    assert "layers.1.ffn.gate.tid2eid" in error
    assert "1 tensor is unexpected: layers.1.ffn.gate.bias" in error


def test_a_module_that_does_not_fit(good: Path):
    module = StandIn(CONFIG)
    module.register_parameter("surplus", torch.nn.Parameter(torch.zeros(1)))
    module.layers.get_submodule("0").attn.attn_sink = torch.nn.Parameter(torch.zeros(5))  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="2 tensors of the model are not what config") as caught:
        load_checkpoint(good / "one", CONFIG, module)
    assert "layers.0.attn.attn_sink (the module lacks it, or has it in another shape), surplus" in str(caught.value)


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def cut_file(size: int) -> Callable[[Path], str]:
    def change(folder: Path) -> str:
        shard = first_shard(folder)
        data = shard.read_bytes()
        shard.write_bytes(data[: size if size >= 0 else len(data) + size])
        return (
            rf"1 file cannot be read: {shard.name} \(\d+ bytes, cut short or not a safetensors file: .*Remedy: copy or"
        )

    return change


def pointer_file(folder: Path) -> str:
    shard = first_shard(folder)
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    return rf"1 file cannot be read: {shard.name} \(\d+ bytes, cut short or not a safetensors file"


def missing_file(folder: Path) -> str:
    shard = first_shard(folder)
    shard.unlink()
    return rf"1 file cannot be read: {shard.name} \(there is no such file\)"


def absent_entry(folder: Path) -> str:
    edit_index(folder, lambda index: index["weight_map"].update({"surplus": first_shard(folder).name}))
    return rf"1 index entry does not fit its file: surplus \(not in {first_shard(folder).name}\)"


def absent_shard(folder: Path) -> str:
    edit_index(folder, lambda index: index["weight_map"].update({"surplus": "model-x.safetensors"}))
    return r"1 file cannot be read: model-x.safetensors \(there is no such file\)"


def outside(folder: Path) -> str:
    edit_index(folder, lambda index: index["weight_map"].update({"norm.weight": "../model.safetensors"}))
    return "1 file cannot be read: model.safetensors.index.json .*not a file name of this folder"


def no_weight_map(folder: Path) -> str:
    edit_index(folder, lambda index: index.pop("weight_map"))
    return r"1 file cannot be read: model.safetensors.index.json \(must be JSON with a weight_map"


def index_list(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("[]")
    return r"1 file cannot be read: model.safetensors.index.json \(must be JSON with a weight_map"


def index_text(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("{")
    return r"1 file cannot be read: model.safetensors.index.json \(must be JSON with a weight_map"


def index_depth(folder: Path) -> str:
    """Python's reader ends such a file in a RecursionError, which is no ValueError."""
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)
    return r"1 file cannot be read: model.safetensors.index.json \(must be JSON with a weight_map"


def no_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").unlink()
    return (
        r"the folder has model-00001-of-\d+.safetensors, .* but neither model.safetensors nor model.safetensors.index"
    )


def nothing(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    return "the folder has neither model.safetensors nor .*; random weights need --load-format dummy"


def folder_as_file(folder: Path) -> str:
    """The error once said that there is a model.safetensors "but neither model.safetensors nor" the index."""
    nothing(folder)
    (folder / "model.safetensors").mkdir()
    return "model.safetensors is no file: it is a folder, or a link to a file that is missing"


def link_to_nothing(folder: Path) -> str:
    nothing(folder)
    (folder / "model.safetensors").symlink_to(folder / "absent")
    return "model.safetensors is no file: it is a folder, or a link to a file that is missing"


def no_folder(folder: Path) -> str:
    shutil.rmtree(folder)
    return "there is no such folder"


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change",
    [
        cut_file(0),
        cut_file(5),
        cut_file(1000),
        cut_file(-1),
        pointer_file,
        missing_file,
        absent_entry,
        absent_shard,
        outside,
        no_weight_map,
        index_list,
        index_text,
        index_depth,
        no_index,
        nothing,
        folder_as_file,
        link_to_nothing,
        no_folder,
    ],
)
def test_wrong_files(change: Callable[[Path], str], good: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(good / "shards", folder)
    pattern = change(folder)
    assert re.search(pattern, error_of(folder))


def break_the_shards(folder: Path) -> str:
    path = first_shard(folder)
    state = load_file(path)
    state.pop(min(state))
    save_file(state, path)
    return "model.safetensors.index.json was read and not model.safetensors beside it; if that is what is meant, delete"


def lose_a_shard(folder: Path) -> str:
    first_shard(folder).unlink()
    return r"was read and not model.safetensors.index.json beside it, of whose files 1 of \d+ are missing"


def spoil_the_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("{")
    return "model.safetensors was read, as the index beside it cannot be: model.safetensors.index.json"


@pytest.mark.parametrize("change", [break_the_shards, lose_a_shard, spoil_the_index])
def test_an_error_says_which_of_two_was_read(change: Callable[[Path], str], good: Path, tmp_path: Path):
    """The tensors of a stale single file were called missing without a word about the index beside it."""
    folder = tmp_path / "model"
    shutil.copytree(good / "shards", folder)
    pattern = change(folder)
    save_file({"norm.weight": torch.zeros(256)}, folder / "model.safetensors")
    error = error_of(folder)
    assert re.search(pattern, error)
    assert "cannot be used:" in error


class LargestResult(TorchDispatchMode):
    """The bytes of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes() if not _is_view(func) else 0)
        return result


def _is_view(func: Any) -> bool:
    return func.is_view or func.__name__.startswith("copy_")


def test_nothing_is_held_twice(good: Path, monkeypatch: pytest.MonkeyPatch):
    """Holding a layer's tensors, or all, before they are copied would need the memory of the model again."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = CheckpointFiles.read

    def watched(self: CheckpointFiles, *what: Any) -> torch.Tensor:
        nonlocal most
        tensor = read(self, *what)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(CheckpointFiles, "read", watched)
    module = StandIn(CONFIG)
    largest = max(
        parameter[0].nbytes if parameter.dim() == 3 else parameter.nbytes for parameter in module.parameters()
    )
    with LargestResult() as results:
        load_checkpoint(good / "shards", CONFIG, module)
    assert most == 2, "at most a weight and its scale"
    assert 0 < results.bytes <= largest
    assert not any(parameter.isnan().any() for parameter in module.parameters())

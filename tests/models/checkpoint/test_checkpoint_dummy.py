"""Random weights: complete, repeatable, and never at the values that hide mistakes."""

from __future__ import annotations

import pytest
import torch
from tests.models.checkpoint.stand_in import StandIn, assert_same
from tests.tiny import tiny_config

from tetrad.errors import CheckpointError
from tetrad.models.checkpoint import dummy_state, expected_tensors, fill_dummy

CONFIG = tiny_config("flash", num_hash_layers=2)


def test_every_tensor_is_there_and_matters():
    state = dummy_state(CONFIG, 0)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        name: spec.shape for name, spec in expected_tensors(CONFIG).items()
    }
    for name, tensor in state.items():
        assert torch.isfinite(tensor).all(), name
        assert len(tensor.unique()) > (1 if tensor.numel() > 1 else 0), f"{name} is constant"
        assert tensor.dtype == (torch.int64 if name.endswith("tid2eid") else torch.float32)


def test_expert_tables_name_distinct_experts():
    table = dummy_state(CONFIG, 0)["layers.1.ffn.gate.tid2eid"]
    assert int(table.min()) == 0
    assert int(table.max()) == CONFIG.n_routed_experts - 1
    assert all(len(set(row)) == CONFIG.num_experts_per_tok for row in table.tolist())


def test_the_seed_decides():
    assert_same(dummy_state(CONFIG, 5), dummy_state(CONFIG, 5))
    other = dummy_state(CONFIG, 6)
    assert all(not torch.equal(tensor, other[name]) for name, tensor in dummy_state(CONFIG, 5).items())


def test_tensors_of_equal_shape_differ():
    """One generator restarted for every tensor would make all experts the same."""
    state = dummy_state(CONFIG, 0)
    experts = [state[f"layers.{layer}.ffn.experts.{expert}.w1.weight"] for layer in (0, 1) for expert in range(8)]
    for index, one in enumerate(experts):
        assert not any(torch.equal(one, other) for other in experts[:index])


def test_filling_a_module_is_the_same():
    module = StandIn(CONFIG)
    fill_dummy(module, CONFIG, 7)
    assert_same(module.values(), dummy_state(CONFIG, 7))


def test_a_module_of_another_configuration_is_refused():
    with pytest.raises(CheckpointError, match="has the shape None, its configuration wants"):
        fill_dummy(StandIn(tiny_config("swa")), CONFIG)
    with pytest.raises(CheckpointError, match=r"embed.weight has the shape \[512, 128\], .* wants \[64, 128\]"):
        fill_dummy(StandIn(CONFIG), tiny_config("flash", vocab_size=64))
    module = StandIn(CONFIG)
    module.get_submodule("layers.3.ffn.experts").w2 = torch.nn.Parameter(torch.zeros(8, 64, 128))
    with pytest.raises(CheckpointError, match=r"experts.w2 has the shape \[64, 128\], .* \[128, 64\] for each expert"):
        fill_dummy(module, CONFIG)

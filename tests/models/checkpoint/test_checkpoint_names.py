"""Names of the three spellings, each against the native name written out by hand."""

from __future__ import annotations

import pytest
from tests.tiny import tiny_config

from tetrad.models.checkpoint import expected_tensors
from tetrad.models.checkpoint.names import Part, is_ignored, native_name, native_parts
from tetrad.models.checkpoint.tensors import scale_name

HUGGING_FACE = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
    "model.layers.12.input_layernorm.weight": "layers.12.attn_norm.weight",
    "model.layers.12.post_attention_layernorm.weight": "layers.12.ffn_norm.weight",
    "model.layers.12.attn_hc.fn": "layers.12.hc_attn_fn",
    "model.layers.12.attn_hc.base": "layers.12.hc_attn_base",
    "model.layers.12.ffn_hc.scale": "layers.12.hc_ffn_scale",
    "model.layers.12.self_attn.sinks": "layers.12.attn.attn_sink",
    "model.layers.12.self_attn.q_a_proj.weight": "layers.12.attn.wq_a.weight",
    "model.layers.12.self_attn.q_a_proj.weight_scale_inv": "layers.12.attn.wq_a.scale",
    "model.layers.12.self_attn.q_a_norm.weight": "layers.12.attn.q_norm.weight",
    "model.layers.12.self_attn.q_b_proj.weight": "layers.12.attn.wq_b.weight",
    "model.layers.12.self_attn.kv_proj.weight": "layers.12.attn.wkv.weight",
    "model.layers.12.self_attn.kv_norm.weight": "layers.12.attn.kv_norm.weight",
    "model.layers.12.self_attn.o_a_proj.weight": "layers.12.attn.wo_a.weight",
    "model.layers.12.self_attn.o_b_proj.weight": "layers.12.attn.wo_b.weight",
    "model.layers.12.self_attn.compressor.kv_proj.weight": "layers.12.attn.compressor.wkv.weight",
    "model.layers.12.self_attn.compressor.gate_proj.weight": "layers.12.attn.compressor.wgate.weight",
    "model.layers.12.self_attn.compressor.position_bias": "layers.12.attn.compressor.ape",
    "model.layers.12.self_attn.compressor.kv_norm.weight": "layers.12.attn.compressor.norm.weight",
    "model.layers.12.self_attn.compressor.indexer.q_b_proj.weight": "layers.12.attn.indexer.wq_b.weight",
    "model.layers.12.self_attn.compressor.indexer.q_b_proj.weight_scale_inv": "layers.12.attn.indexer.wq_b.scale",
    "model.layers.12.self_attn.compressor.indexer.scorer.weights_proj.weight": (
        "layers.12.attn.indexer.weights_proj.weight"
    ),
    "model.layers.12.self_attn.compressor.indexer.kv_proj.weight": "layers.12.attn.indexer.compressor.wkv.weight",
    "model.layers.12.self_attn.compressor.indexer.gate_proj.weight": "layers.12.attn.indexer.compressor.wgate.weight",
    "model.layers.12.self_attn.compressor.indexer.position_bias": "layers.12.attn.indexer.compressor.ape",
    "model.layers.12.self_attn.compressor.indexer.kv_norm.weight": "layers.12.attn.indexer.compressor.norm.weight",
    "model.layers.12.mlp.gate.weight": "layers.12.ffn.gate.weight",
    "model.layers.12.mlp.gate.e_score_correction_bias": "layers.12.ffn.gate.bias",
    "model.layers.12.mlp.gate.tid2eid": "layers.12.ffn.gate.tid2eid",
    "model.layers.12.mlp.shared_experts.gate_proj.weight": "layers.12.ffn.shared_experts.w1.weight",
    "model.layers.12.mlp.shared_experts.down_proj.weight": "layers.12.ffn.shared_experts.w2.weight",
    "model.layers.12.mlp.shared_experts.up_proj.weight_scale_inv": "layers.12.ffn.shared_experts.w3.scale",
    "model.layers.12.mlp.experts.31.gate_proj.weight": "layers.12.ffn.experts.31.w1.weight",
    "model.layers.12.mlp.experts.31.down_proj.weight_scale_inv": "layers.12.ffn.experts.31.w2.scale",
    "model.layers.12.mlp.experts.31.up_proj.weight": "layers.12.ffn.experts.31.w3.weight",
}

# what save_pretrained of transformers 5.24 writes where it is neither of the two
SAVED = {
    "head.weight": "head.weight",
    "model.layers.12.attn.norm.weight": "layers.12.attn.kv_norm.weight",
    "model.layers.12.attn.compressor.norm.weight": "layers.12.attn.compressor.norm.weight",
    "model.layers.12.attn.indexer.compressor.norm.weight": "layers.12.attn.indexer.compressor.norm.weight",
    "model.layers.12.attn_norm.weight": "layers.12.attn_norm.weight",
    "model.layers.12.hc_attn_scale": "layers.12.hc_attn_scale",
    "model.layers.12.ffn.experts.31.w1.weight": "layers.12.ffn.experts.31.w1.weight",
    "model.layers.12.attn.wq_a.weight_scale_inv": "layers.12.attn.wq_a.scale",
}


@pytest.mark.parametrize(("name", "native"), [*HUGGING_FACE.items(), *SAVED.items()])
def test_translation(name: str, native: str):
    assert native_name(name) == native
    assert native_parts(name, (4, 4)) == [Part(native)]


def test_native_names_stay():
    """A rule that catches a native name as well would send the tensor elsewhere."""
    for name, spec in expected_tensors(tiny_config("flash")).items():
        assert native_parts(name, spec.shape) == [Part(name)]
        assert native_parts(f"model.{name}", spec.shape) == [Part(name)]
        if spec.has_scale:
            assert native_name(scale_name(name)) == scale_name(name)


def test_gate_stands_first_in_a_stack():
    parts = native_parts("model.layers.1.mlp.experts.gate_up_proj", (2, 6, 5))
    assert parts == [
        Part("layers.1.ffn.experts.0.w1.weight", 0, 0, 3),
        Part("layers.1.ffn.experts.0.w3.weight", 0, 3, 6),
        Part("layers.1.ffn.experts.1.w1.weight", 1, 0, 3),
        Part("layers.1.ffn.experts.1.w3.weight", 1, 3, 6),
    ]


def test_other_stacks():
    assert native_parts("model.layers.1.mlp.experts.down_proj", (1, 5, 3)) == [
        Part("layers.1.ffn.experts.0.w2.weight", 0, 0, 5)
    ]
    assert native_parts("model.layers.1.mlp.experts.down_proj_scale_inv", (1, 2, 1)) == [
        Part("layers.1.ffn.experts.0.w2.scale", 0, 0, 2)
    ]
    assert native_parts("layers.1.ffn.experts.w3", (1, 5, 3)) == [Part("layers.1.ffn.experts.0.w3.weight", 0, 0, 5)]


@pytest.mark.parametrize(
    "name", ["foo", "layers.1", "layers.1.foo.bar", "layers.1.ffn.experts.w4", "layers.1.attn.foo"]
)
def test_unknown_names_come_back(name: str):
    assert native_parts(name, (2, 2, 2)) == [Part(name)]


def test_odd_stack_is_not_split():
    assert native_parts("layers.1.ffn.experts.gate_up_proj", (2, 5, 5)) == [Part("layers.1.ffn.experts.gate_up_proj")]


def test_prediction_layers_are_ignored():
    assert is_ignored("mtp.0.attn.wq_a.weight")
    assert is_ignored("model.mtp.2.norm.weight")
    assert not is_ignored("layers.0.attn.wq_a.weight")

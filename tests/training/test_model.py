"""The training model computes what transformers computes, and continues a document as it reads it in one go."""

import re

import pytest
import torch
from model import Model, Pass, Shape

SHAPE = Shape(
    hidden_size=64, compress_ratios=(0, 4, 16, 4), num_attention_heads=4, head_dim=64, qk_rope_head_dim=16,
    q_lora_rank=48, o_groups=2, o_lora_rank=32, sliding_window=16, index_n_heads=32, index_head_dim=64, index_topk=6,
    moe_intermediate_size=32, n_routed_experts=8, num_hash_layers=1, vocab_size=100, rope_original_positions=1024,
    max_position_embeddings=16384,
)  # fmt: skip

RENAMES = (
    ("indexer.compressor.", "compressor.indexer.@"), ("indexer.wq_b", "compressor.indexer.q_b_proj"),
    ("indexer.weights_proj", "compressor.indexer.scorer.weights_proj"), ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."), (".attn_norm", ".input_layernorm"), (".ffn_norm", ".post_attention_layernorm"),
    (".attn.", ".self_attn."), (".ffn.", ".mlp."), ("attn_sink", "sinks"), ("wq_a", "q_a_proj"),
    ("q_norm", "q_a_norm"), (".wq_b", ".q_b_proj"), ("wo_a", "o_a_proj"), ("wo_b", "o_b_proj"),
    ("@wkv", "kv_proj"), ("@wgate", "gate_proj"), ("@ape", "position_bias"), ("@norm", "kv_norm"),
    ("compressor.wkv", "compressor.kv_proj"), ("compressor.wgate", "compressor.gate_proj"),
    ("compressor.ape", "compressor.position_bias"), ("compressor.norm", "compressor.kv_norm"),
    (".wkv", ".kv_proj"), ("gate.bias", "gate.e_score_correction_bias"),
    ("shared_experts.w1", "shared_experts.gate_proj"),
    ("shared_experts.w2", "shared_experts.down_proj"), ("shared_experts.w3", "shared_experts.up_proj"),
)  # fmt: skip


def hf_name(name: str) -> str:
    top = {
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "norm.weight": "model.norm.weight",
    }
    if name in top or name.startswith("hc_head"):
        return top.get(name, "model.hc_head." + name.replace("hc_head_", "hc_"))
    for ours, theirs in RENAMES:
        name = name.replace(ours, theirs)
    return "model." + name


@pytest.fixture(scope="module")
def model() -> Model:
    """Random weights everywhere, also where training starts from zeros."""
    made = Model(SHAPE, 1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("_fn"):
                parameter.mul_(5)
            elif not name.endswith(".weight") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for layer in made.layers:
            if not layer.ffn.gate.hashed:
                layer.ffn.gate.bias.normal_(std=0.3)
    return made


def test_logits_equal_transformers(model: Model) -> None:
    """A model trained with a wrong formula would be of no use, however well it recalls."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    values = SHAPE.to_config()
    dropped = ("compress_ratios", "architectures", "quantization_config", "expert_dtype", "torch_dtype", "hidden_act")
    rope = {key: value for key, value in values["rope_scaling"].items() if key != "type"}
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 16: "heavily_compressed_attention"}
    config = transformers.DeepseekV4Config(
        **{key: value for key, value in values.items() if key not in (*dropped, "rope_scaling")},
        layer_types=[kinds[ratio] for ratio in SHAPE.compress_ratios],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        rope_parameters=rope,
    )
    oracle = transformers.DeepseekV4ForCausalLM(config).float().eval()
    state = {hf_name(name): value for name, value in model.native_state().items() if ".experts." not in name}
    for number, layer in enumerate(model.layers):
        experts, prefix = layer.ffn.experts, f"model.layers.{number}.mlp.experts."
        state[prefix + "gate_up_proj"] = torch.cat([experts.w1.weight, experts.w3.weight], 1).detach()
        state[prefix + "down_proj"] = experts.w2.weight.detach()
    oracle.load_state_dict(state)
    tokens = torch.randint(0, 100, (2, 112), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = oracle(tokens).logits
        found = model(tokens, Pass(selection=True, topk=6, index_format="bf16"))
        everything = model(tokens, Pass(selection=False))
    assert (found - wanted).abs().max() < 1e-4
    assert (everything - wanted).abs().max() > 1e-2, "the selection has to matter, or the test shows nothing"


def test_continuation_equals_one_pass(model: Model) -> None:
    """The evaluation asks many questions behind one document; an entry that spans the seam uses both sides."""
    generator = torch.Generator().manual_seed(4)
    document = torch.randint(0, 100, (1, 112), generator=generator)
    questions = torch.randint(0, 100, (3, 15), generator=generator)
    common = {"selection": True, "topk": 6, "index_format": "fp4", "cache_quantised": True}
    with torch.no_grad():
        run = Pass(**common, keep=[])
        model(document, run)
        found = model(questions, Pass(**common, prefix=run.keep, prefix_length=112))
        whole = torch.cat([document.expand(3, -1), questions, questions[:, :1]], 1)
        wanted = model(whole, Pass(**common))[:, 112:127]
    assert (found - wanted).abs().max() < 1e-4


def test_native_names_survive(model: Model) -> None:
    """`load_native` undoes `native_state`, and no name is left that a checkpoint would not have."""
    state = model.native_state()
    assert not [name for name in state if re.search(r"ffn\.experts\.w|frequencies|hadamard", name)]
    other = Model(SHAPE, 2)
    other.load_native(state)
    assert all(torch.equal(value, state[name]) for name, value in other.native_state().items())

"""The sizes of the model and the config.json that states them."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, under the names of the checkpoint's config.json."""

    vocab_size: int = 264
    hidden_size: int = 256
    compress_ratios: tuple[int, ...] = (0, 0, 4, 128, 4, 0)
    num_attention_heads: int = 8
    head_dim: int = 128
    qk_rope_head_dim: int = 32
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 128
    sliding_window: int = 64
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 48
    moe_intermediate_size: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    num_hash_layers: int = 2
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_original_positions: int = 65536
    max_position_embeddings: int = 1048576

    def to_config(self) -> dict:
        """The checkpoint's config.json."""
        values = asdict(self)
        factor, original = values.pop("rope_factor"), values.pop("rope_original_positions")
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            **values,
            "compress_ratios": list(self.compress_ratios),
            "num_hidden_layers": len(self.compress_ratios),
            "num_key_value_heads": 1,
            "n_shared_experts": 1,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "tie_word_embeddings": False,
            "attention_bias": False,
            "hidden_act": "silu",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
            "expert_dtype": "fp4",
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
                "activation_scheme": "dynamic",
            },
        }

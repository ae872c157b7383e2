"""Small models for the tests: configurations with every kind of layer, and the transformers oracle for them."""

from __future__ import annotations

from typing import Any

import torch

from tetrad.models.config import ModelConfig

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 8,
    "index_n_heads": 32,  # with few heads many scores are exactly zero, and ties are broken differently by everyone
    "index_head_dim": 64,
    "index_topk": 8,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 1,
    "swiglu_limit": 1.5,  # low enough that clamping changes something
    "rope_factor": 16.0,
    "rope_original_max_position_embeddings": 64,
    "max_position_embeddings": 1024,  # = factor * original
    "torch_dtype": "float32",
}

# per kind: compression ratios with H for the HCA ratio, and what else differs
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash": ("0 4 H 4 H", {}),
    "pro": ("H 4 H 4", {"index_head_dim": 128, "routed_scaling_factor": 2.5, "o_groups": 4}),
    "swa": ("0 0", {}),
    "csa": ("4 4", {}),
    "hca": ("H H", {}),
}


def tiny_config(kind: str = "flash", *, hca_ratio: int = 16, **overrides: Any) -> ModelConfig:
    """A small configuration.

    Args:
        kind: the order of the layers. "flash": SWA CSA HCA CSA HCA; "pro": HCA CSA HCA CSA; "swa", "csa", "hca": two
            layers of that kind.
        hca_ratio: tokens per entry of the HCA layers: 16, or 128 as in the released models.
        overrides: fields of ``ModelConfig``; ``sliding_window=128`` gives the released window.
    """
    pattern, differences = _KINDS[kind]
    ratios = tuple(hca_ratio if part == "H" else int(part) for part in pattern.split())
    values = _COMMON | {"num_hidden_layers": len(ratios), "compress_ratios": ratios} | differences | overrides
    return ModelConfig(**values)


def hf_config(config: ModelConfig) -> Any:
    """The transformers configuration of the same model (without quantisation)."""
    from transformers import DeepseekV4Config

    document = config.to_native_dict()
    for name in ("quantization_config", "expert_dtype", "architectures", "model_type", "compress_ratios"):
        document.pop(name, None)
    kinds = {"swa": "sliding_attention", "csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention"}
    document["layer_types"] = [kinds[kind.value] for kind in config.layer_kinds]
    document["compress_rates"] = {
        "compressed_sparse_attention": config.csa_ratio,
        "heavily_compressed_attention": config.hca_ratio or 128,
    }
    return DeepseekV4Config(**document)


def hf_model(config: ModelConfig, seed: int = 0) -> Any:
    """The transformers model of a configuration, fp32, with random weights in every parameter.

    transformers initialises sinks, position biases, hyper-connection bases, router biases and the hash table with
    zeros, which would hide mistakes; here all of them hold values that matter. ``model.save_pretrained(folder)`` gives
    a checkpoint; the model is in eval mode.
    """
    from transformers import DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM(hf_config(config)).float().eval()
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator) * std + mean

    with torch.no_grad():
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
            leaf = name.rsplit(".", 1)[-1]
            if "inv_freq" in leaf:
                continue
            if leaf == "tid2eid":
                draws = torch.rand(tensor.shape[0], config.n_routed_experts, generator=generator)
                tensor.copy_(draws.argsort(dim=-1)[:, : tensor.shape[1]])
            elif leaf == "sinks":
                tensor.copy_(normal(tensor, 1.0))
            elif leaf == "position_bias":
                tensor.copy_(normal(tensor, 0.5))
            elif leaf == "e_score_correction_bias":
                tensor.copy_(normal(tensor, 0.2))
            elif leaf in ("scale", "hc_scale"):
                tensor.copy_(normal(tensor, 0.2, 1.0))
            elif leaf in ("base", "hc_base"):
                tensor.copy_(normal(tensor, 0.5))
            elif leaf == "weight" and tensor.dim() == 1:  # norms
                tensor.copy_(normal(tensor, 0.2, 1.0))
            elif name == "model.embed_tokens.weight":
                tensor.copy_(normal(tensor, 1.0))
            else:
                tensor.copy_(normal(tensor, tensor.shape[-1] ** -0.5))
    return model

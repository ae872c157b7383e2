"""The recipes: a model's shape and the stages of its training."""

from __future__ import annotations

from data import Stage
from shape import Shape

TINY = Shape(
    hidden_size=64, compress_ratios=(0, 4, 128, 0), num_attention_heads=2, head_dim=64, qk_rope_head_dim=16,
    q_lora_rank=32, o_groups=1, o_lora_rank=32, index_n_heads=32, index_head_dim=32, index_topk=16,
    moe_intermediate_size=32, n_routed_experts=4, num_hash_layers=1,
)  # fmt: skip

RECIPES: dict[str, tuple[Shape, list[Stage]]] = {
    "tiny": (
        TINY,
        [
            Stage(30, (256,), tokens=1024, rows=32),
            Stage(20, (256, 512), selection=True, quantised=True, gaps=0.5, tokens=1024, rows=32),
        ],
    ),
    "cpu": (
        TINY,
        [
            Stage(2400, (256,), tokens=2048, rows=128),
            Stage(400, (256, 512), tokens=2048, rows=128),
            Stage(800, (512, 1024), selection=True, quantised=True, gaps=0.3, tokens=2048, rows=128),
        ],
    ),
    "probe": (
        Shape(),
        [
            Stage(500, (256,)),
            Stage(500, (512, 1024)),
            Stage(500, (1024, 2048), selection=True, gaps=0.3),
        ],
    ),
    "short": (
        Shape(),
        [
            Stage(100, (256,), varied=0.5),
            Stage(125, (512, 1024), varied=0.5),
            Stage(125, (1024, 2048), selection=True, gaps=0.3, varied=0.5),
            Stage(250, (2048, 4096, 8192), selection=True, quantised=True, gaps=0.5, varied=0.5),
        ],
    ),
    "full": (
        Shape(),
        [  # The first leg ends at step 4900; the last stage is a leg of its own.
            Stage(400, (256,)),
            Stage(500, (512, 1024)),
            Stage(600, (1024, 2048), selection=True, gaps=0.3),
            Stage(1200, (1024, 2048, 4096, 8192), selection=True, gaps=0.5),
            Stage(2200, (512, 2048, 4096, 8192, 16384, 32768), selection=True, quantised=True, gaps=0.5),
            Stage(
                2000,
                (256, 1024, 2048, 8192, 16384, 32768),
                selection=True,
                quantised=True,
                gaps=0.5,
                varied=0.6,
                density=4.0,
                peak=0.35,
            ),
        ],
    ),
}

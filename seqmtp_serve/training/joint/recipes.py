"""The recipes that ship. A recipe is data: another one is another record, not another trainer."""

from __future__ import annotations

from dataclasses import replace

from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig, MoeConfig
from seqmtp_serve.training.joint.recipe import Optimization, Recipe
from seqmtp_serve.training.loss_weight import LossWeightSchedule
from seqmtp_serve.training.mtp_objective import ObjectiveContract

# What runtimes of the released checkpoints do: rows after the final norm, the main model's norm before the head.
_RELEASED = MtpConfig(fed_hidden="post", recycled_hidden="post", final_norm_owner="main")

V3_TINY = Recipe(
    name="v3-tiny",
    model=DeepseekConfig(
        vocab_size=1024,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        q_lora_rank=128,
        kv_lora_rank=512,  # with 64 rotary values: the one shape that GPU kernels for latent attention are built for
        nope_head_dim=32,
        rope_head_dim=64,
        v_head_dim=32,
        intermediate_size=768,
        num_dense_layers=1,
        moe=MoeConfig(num_experts=16, num_shared=1, top_k=2, intermediate_size=128, num_groups=4, top_k_groups=2),
        max_position=1024,
    ),
    mtp=_RELEASED,
    # 0.3, then 0.1 for the last third of this run; DeepSeek-V3's own lengths mean nothing here. Three epochs of the
    # standard library: an hour and a half of one core.
    objective=ObjectiveContract(schedule=LossWeightSchedule(phases=((0, 0.3), (6_500_000, 0.1)))),
    optimization=Optimization(tokens=9_800_000, seed=1, products="bfloat16"),
)

# Small enough that four arms times three seeds of `train ablate` take a quarter of an hour of one core.
V3_ABLATION = replace(
    V3_TINY,
    name="v3-ablation",
    model=replace(
        V3_TINY.model,
        hidden_size=128,
        num_layers=3,
        q_lora_rank=64,
        kv_lora_rank=128,
        nope_head_dim=16,
        rope_head_dim=16,
        v_head_dim=16,
        intermediate_size=384,
        moe=replace(V3_TINY.model.moe, num_experts=8, intermediate_size=64),
    ),
    optimization=Optimization(
        tokens=400_000, seed=1, lr=4e-3, warmup_steps=20, streams_per_step=2, stream_len=1024, window=256
    ),
)

RECIPES = {recipe.name: recipe for recipe in (V3_TINY, V3_ABLATION)}

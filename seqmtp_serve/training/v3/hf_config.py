"""The released `config.json` of a model trained here."""

from __future__ import annotations

from typing import Any

from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig


def hf_config(config: DeepseekConfig, mtp: MtpConfig, *, bos: int = 0, eos: int = 1) -> dict[str, Any]:
    """Field by field as the released files spell it; `bos` and `eos` are token ids."""
    moe, yarn = config.moe, config.yarn
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_nextn_predict_layers": mtp.num_modules,
        "first_k_dense_replace": config.num_dense_layers,
        "moe_layer_freq": 1,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": moe.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank or None,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.nope_head_dim,
        "qk_rope_head_dim": config.rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared,
        "num_experts_per_tok": moe.top_k,
        "n_group": moe.num_groups,
        "topk_group": moe.top_k_groups,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": moe.normalise_weights,
        "routed_scaling_factor": moe.routed_scaling,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if yarn is None
        else {
            "type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        },
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }

"""The released configuration, field by field, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_deepseek as tiny
from tiny_deepseek import CONFIG

from seqmtp_serve.checkpoint.deepseek_config import deepseek_config_from_hf
from seqmtp_serve.checkpoint.fp8 import BlockFormat
from seqmtp_serve.errors import TargetIncomplete
from seqmtp_serve.model.deepseek_config import MoeConfig, YarnConfig

# The numbers of DeepSeek-V3's config.json (deepseek-ai/DeepSeek-V3).
RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_released_file() -> None:
    found = deepseek_config_from_hf(RELEASED)
    config = found.model
    assert (found.family, found.num_mtp_layers) == ("deepseek_v3", 1)
    assert found.quantization == BlockFormat(rows=128, columns=128)
    assert (config.num_layers, config.num_dense_layers, config.hidden_size) == (61, 3, 7168)
    assert (config.query_head_dim, config.latent_size) == (192, 576)
    assert config.moe == MoeConfig(
        num_experts=256,
        num_shared=1,
        top_k=8,
        intermediate_size=2048,
        num_groups=8,
        top_k_groups=4,
        normalise_weights=True,
        routed_scaling=2.5,
    )
    assert config.yarn == YarnConfig(factor=40.0, original_max_position=4096)


def test_v31_stores_its_activation_scales_otherwise_and_reads_the_same() -> None:
    quantization = RELEASED["quantization_config"] | {"scale_fmt": "ue8m0"}
    assert deepseek_config_from_hf(RELEASED | {"quantization_config": quantization}) == deepseek_config_from_hf(
        RELEASED
    )


def test_both_spellings_of_the_rotary_fields_and_of_the_mtp_count() -> None:
    newer = {name: value for name, value in RELEASED.items() if name not in ("rope_scaling", "rope_theta")}
    del newer["num_nextn_predict_layers"]
    newer["num_mtp_layers"] = 1
    scaling = {name: value for name, value in RELEASED["rope_scaling"].items() if name != "type"}
    newer["rope_parameters"] = scaling | {"rope_type": "yarn", "rope_theta": 10000.0}
    assert deepseek_config_from_hf(newer) == deepseek_config_from_hf(RELEASED)


def test_plain_positions_no_query_latent_and_no_mtp_layer() -> None:
    found = deepseek_config_from_hf(
        tiny.hf_config() | {"rope_scaling": None, "q_lora_rank": None, "num_nextn_predict_layers": None}
    )
    assert found.model.yarn is None
    assert found.model.q_lora_rank == 0
    assert found.num_mtp_layers == 0
    assert found.quantization is None


def test_the_tiny_file_reads_back() -> None:
    assert deepseek_config_from_hf(tiny.hf_config()).model == CONFIG


def test_glm_lite_says_which_layers_are_dense_by_a_list() -> None:
    glm = tiny.hf_config() | {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "sparse"]}
    del glm["first_k_dense_replace"]
    found = deepseek_config_from_hf(glm)
    assert (found.family, found.model.num_dense_layers) == ("glm4_moe_lite", 1)
    with pytest.raises(TargetIncomplete, match="mlp_layer_types"):
        deepseek_config_from_hf(glm | {"mlp_layer_types": ["sparse", "dense"]})


@pytest.mark.covers(13)
@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("model_type", "deepseek_v32", "deepseek_v32"),
        ("model_type", "glm4_moe", "grouped queries, .*; deepseek_v3, glm4_moe_lite are"),
        ("index_topk", 2048, "indexer"),
        ("index_n_heads", 64, "indexer"),
        ("sliding_window", 128, "window"),
        ("scoring_func", "softmax", "scoring_func"),
        ("topk_method", "group_limited_greedy", "topk_method"),
        ("moe_layer_freq", 2, "moe_layer_freq"),
        ("hidden_act", "gelu", "hidden_act"),
        ("attention_bias", True, "attention_bias"),
        ("rope_interleave", False, "rope_interleave"),
        ("rope_scaling", {"type": "linear", "factor": 4}, "rope_scaling"),
        ("rope_scaling", {"type": "yarn", "factor": 4}, "original_max_position_embeddings"),
        ("rope_scaling", {"type": "default", "long_factor": [1.0]}, "long_factor"),
        ("rope_scaling", RELEASED["rope_scaling"] | {"attention_factor": 1.2}, "attention_factor"),
        ("rope_scaling", {k: v for k, v in RELEASED["rope_scaling"].items() if k != "mscale"}, "mscale"),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("quantization_config", {"quant_method": "awq"}, "awq"),
        ("quantization_config", {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fp8"),
        ("quantization_config", {"quant_method": "fp8"}, "weight_block_size"),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ("num_key_value_heads", 1, "num_key_value_heads"),
        ("num_mtp_layers", 2, "num_mtp_layers"),
        ("n_group", 3, "n_group"),
        ("n_group", 4, "n_group"),
        ("topk_group", 3, "topk_group"),
        ("num_experts_per_tok", 3, "num_experts_per_tok"),
        ("first_k_dense_replace", 3, "first_k_dense_replace"),
        ("qk_rope_head_dim", 3, "qk_rope_head_dim"),
        ("kv_lora_rank", None, "kv_lora_rank"),
        ("vocab_size", "40", "vocab_size"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(field: str, value: object, word: str) -> None:
    with pytest.raises(TargetIncomplete, match=word):
        deepseek_config_from_hf(tiny.hf_config() | {field: value})

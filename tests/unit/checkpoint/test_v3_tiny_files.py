"""The files of `v3-tiny`: both gates, the recipe's shape, and what transformers and vLLM make of them."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from seqmtp_serve import oracle
from seqmtp_serve.checkpoint.checkpoint import Checkpoint
from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.training.joint.recipes import V3_TINY
from services.cli import main as seqmtp
from services.gateway.text_model import open_text_model
from tests.unit.v3_tiny import MODEL, greedy, prompts

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(MODEL)


@pytest.mark.covers(7, 61, 62, 63)
def test_both_gates_pass_to_the_last_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        seqmtp(["inspect", MODEL, "--json"])
    assert done.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["target"]["ok"], found["mtp"]["ok"]) == (MODEL, True, True)
    assert found["manifest"]["mtp"]["tensor_fingerprints"], "its values are sealed"


@pytest.mark.covers(8, 66)
def test_it_is_what_the_recipe_says_and_small(checkpoint: Checkpoint) -> None:
    assert checkpoint.config == V3_TINY.model
    assert checkpoint.mtp_config == V3_TINY.mtp
    assert (checkpoint.config.kv_lora_rank, checkpoint.config.rope_head_dim) == (512, 64)
    assert sum(file.stat().st_size for file in checkpoint.path.iterdir()) <= 24_000_000


@pytest.mark.covers(66, 150)
def test_transformers_has_its_logits_and_its_text(checkpoint: Checkpoint) -> None:
    """Both read the same bf16 values and compute in float32: they differ by rounding alone."""
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    tensors = checkpoint.target_tensors()
    for prompt in prompts(3):
        request = greedy(checkpoint, prompt, NEW_TOKENS)
        ids = torch.tensor([request.prompt_ids])
        ours_TV, _ = oracle.forward(tensors, checkpoint.config, request.prompt_ids)
        with torch.inference_mode():
            their_logits_TV = theirs(ids).logits[0]
            text = theirs.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
        torch.testing.assert_close(ours_TV, their_logits_TV, rtol=1e-4, atol=1e-3)
        assert text[0, len(request.prompt_ids) :].tolist() == oracle.generate(tensors, checkpoint.config, request)


@pytest.mark.covers(66)
def test_transformers_reads_its_texts_alike(checkpoint: Checkpoint) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(checkpoint.path), open_text_model(MODEL)
    assert ours.template is not None
    assert theirs.eos_token_id == checkpoint.eos_token_ids[0]
    turns = [
        {"role": "user", "content": "def f(x):"},
        {"role": "assistant", "content": "\n    return x"},
        {"role": "user", "content": "def g(x):"},
    ]
    rendered = ours.template.render(turns)
    assert rendered == "<bos>def f(x):\n    return x\ndef g(x):", "a conversation is one text, continued"
    ids = ours.tokenizer.encode(rendered, add_special_tokens=False).ids
    assert theirs.apply_chat_template(turns, tokenize=True, return_dict=False, add_generation_prompt=True) == ids
    assert ids[0] == checkpoint.bos_token_id
    assert checkpoint.eos_token_ids[0] not in ids
    for prompt in prompts(3):
        assert theirs.decode(theirs(prompt, add_special_tokens=False)["input_ids"]) == prompt


@pytest.mark.covers(8, 66)
def test_every_weight_of_vllms_mtp_model_is_filled(checkpoint: Checkpoint) -> None:
    """Names and shapes as vLLM's `deepseek_mtp.py` loads them; vLLM itself is not run.

    It takes the layers from `num_hidden_layers` on, calls all but five of their parts `mtp_block`, and stacks the
    projections that share an input and the experts of a layer.
    """
    config = json.loads((checkpoint.path / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["num_nextn_predict_layers"] == 1
    layer = f"model.layers.{config['num_hidden_layers']}."
    found: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for name, spec in checkpoint.target_source.specs.items():
        if name.startswith(layer):
            found[_in_vllm(name, layer)].append(tuple(spec.shape))
    d, vocabulary, inner = config["hidden_size"], config["vocab_size"], config["moe_intermediate_size"]
    heads, experts = config["num_attention_heads"], config["n_routed_experts"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    shared = inner * config["n_shared_experts"]
    block = f"{layer}mtp_block."
    assert found == {
        "model.embed_tokens.weight": [(vocabulary, d)],
        f"{layer}enorm.weight": [(d,)],
        f"{layer}hnorm.weight": [(d,)],
        f"{layer}eh_proj.weight": [(d, 2 * d)],
        f"{layer}shared_head.norm.weight": [(d,)],
        f"{layer}shared_head.head.weight": [(vocabulary, d)],
        f"{block}input_layernorm.weight": [(d,)],
        f"{block}post_attention_layernorm.weight": [(d,)],
        f"{block}self_attn.fused_qkv_a_proj.weight": [(latent + rope, d), (query, d)],
        f"{block}self_attn.q_a_layernorm.weight": [(query,)],
        f"{block}self_attn.q_b_proj.weight": [(heads * (nope + rope), query)],
        f"{block}self_attn.kv_a_layernorm.weight": [(latent,)],
        f"{block}self_attn.kv_b_proj.weight": [(heads * (nope + value), latent)],
        f"{block}self_attn.o_proj.weight": [(d, heads * value)],
        f"{block}mlp.gate.weight": [(experts, d)],
        f"{block}mlp.gate.e_score_correction_bias": [(experts,)],
        f"{block}mlp.experts.w13_weight": [(inner, d)] * 2 * experts,
        f"{block}mlp.experts.w2_weight": [(d, inner)] * experts,
        f"{block}mlp.shared_experts.gate_up_proj.weight": [(shared, d)] * 2,
        f"{block}mlp.shared_experts.down_proj.weight": [(d, shared)],
    }


def _in_vllm(name: str, layer: str) -> str:
    """The parameter that a stored tensor is loaded into."""
    own = name.removeprefix(layer)
    first = own.partition(".")[0]
    if first == "embed_tokens":
        return f"model.{own}"
    if first in ("enorm", "hnorm", "eh_proj", "shared_head"):
        return name
    parts = own.split(".")
    if parts[1] == "experts":
        return f"{layer}mtp_block.mlp.experts.{'w2' if parts[3] == 'down_proj' else 'w13'}_weight"
    for stacked, members in {
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    }.items():
        parts = [stacked if part in members else part for part in parts]
    return f"{layer}mtp_block.{'.'.join(parts)}"

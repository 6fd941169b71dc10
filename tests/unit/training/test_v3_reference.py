"""The trainable model against transformers' DeepseekV3 on the same weights: logits, gate choices, and the MTP layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_v3 import CONFIG, random_documents, tiny_v3
from torch import Tensor

from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig, MoeConfig, YarnConfig
from seqmtp_serve.training.packing import compile_stream, pack
from seqmtp_serve.training.v3.gate import choose_experts
from seqmtp_serve.training.v3.hf_config import hf_config
from seqmtp_serve.training.v3.model import V3Model
from seqmtp_serve.training.v3.products import INVARIANT

transformers = pytest.importorskip("transformers")

YARN = YarnConfig(factor=4.0, original_max_position=32)
CASES = {
    "plain": CONFIG,
    "full query": replace(CONFIG, q_lora_rank=0),
    "one group": replace(CONFIG, moe=replace(CONFIG.moe, num_groups=1, top_k_groups=1)),
    "yarn": replace(CONFIG, yarn=YARN, max_position=128),
    "no normalised weights": replace(CONFIG, moe=replace(CONFIG.moe, normalise_weights=False)),
}


def reference(model: V3Model) -> torch.nn.Module:
    """transformers' model with the main model's tensors, its experts fused as it keeps them in memory."""
    found = hf_config(model.config, model.mtp)
    config = transformers.DeepseekV3Config(
        **{k: v for k, v in found.items() if k not in ("architectures", "model_type")}
    )
    config._attn_implementation = "eager"
    theirs = transformers.DeepseekV3ForCausalLM(config).eval()
    ours = model.state_dict()
    state: dict[str, Tensor] = {}
    for name in theirs.state_dict():
        if name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            experts = range(model.config.moe.num_experts)
            gates, ups = ([ours[f"{stem}{e}.{part}_proj.weight"] for e in experts] for part in ("gate", "up"))
            state[name] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        elif name.endswith(".experts.down_proj"):
            stem = name.removesuffix("down_proj")
            state[name] = torch.stack(
                [ours[f"{stem}{e}.down_proj.weight"] for e in range(model.config.moe.num_experts)]
            )
        else:
            state[name] = ours[name]
    theirs.load_state_dict(state, strict=False)
    return theirs


@pytest.mark.covers(66, 148, 150)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_are_the_references(name: str) -> None:
    model = tiny_v3(1, config=CASES[name]).eval()
    document = random_documents([20])[0]
    ours = model.logits(model.main_states(compile_stream(pack([document]), 1).main))
    theirs = reference(model)(torch.tensor([document])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.covers(31, 150)
@torch.no_grad()
def test_a_packed_invariant_run_is_the_references_run_of_each_document() -> None:
    model = tiny_v3(1, arithmetic=INVARIANT).eval()
    documents = random_documents([9, 5, 14])
    ours = model.logits(model.main_states(compile_stream(pack(documents), 1).main))
    theirs = reference(model)
    alone = torch.cat([theirs(torch.tensor([document])).logits[0] for document in documents])
    torch.testing.assert_close(ours, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.covers(17, 19, 60, 64, 150)
@torch.no_grad()
def test_the_mtp_layer_is_the_references() -> None:
    """transformers feeds post-norm rows, keeps the order eh, and ends with the layer's own norm."""
    from transformers.modeling_layers import MtpLayer

    mtp = MtpConfig(fed_hidden="post", final_norm_owner="mtp")
    model = tiny_v3(1, mtp=mtp).eval()
    theirs = reference(model)
    layer_class, norm_class = type(theirs.model.layers[-1]), type(theirs.model.norm)
    layer = MtpLayer(theirs.config, layer_class, norm_class, CONFIG.num_layers).eval()
    donor = reference(V3Model(replace(CONFIG, num_layers=3), MtpConfig(num_modules=0)))  # fuses the experts of layer 2
    ours = model.state_dict()
    prefix = "model.layers.2."
    fused = replace_layer(donor, ours)
    layer.mtp_block.load_state_dict(fused)
    for name in ("enorm", "hnorm", "eh_proj"):
        getattr(layer, name).weight.copy_(ours[f"{prefix}{name}.weight"])
    layer.post_norm.weight.copy_(ours[f"{prefix}shared_head.norm.weight"])

    document = random_documents([12])[0]
    stream = compile_stream(pack([document]), 1)
    h0 = model.main_states(stream.main)
    h1 = model.mtp_states(1, h0, stream.depths[0])
    normed = model.model.norm(h0)[None, :-1]
    positions = torch.arange(11)[None]
    mask = torch.full((11, 11), float("-inf")).triu(1)[None, None]
    out = layer(
        inputs_embeds=model.model.embed_tokens(torch.tensor(document[1:]))[None],
        previous_hidden_state=normed,
        position_embeddings=theirs.model.rotary_emb(normed, positions),
        attention_mask=mask,
        position_ids=positions,
        cache=None,
    )[0]
    torch.testing.assert_close(model.mtp_layer(1).shared_head.norm(h1), out, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.logits(h1, 1), theirs.lm_head(out), rtol=1e-3, atol=1e-4)


def replace_layer(donor: torch.nn.Module, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Layer 2 of our state_dict in the shape of a transformers decoder layer."""
    wanted = donor.model.layers[2].state_dict()
    experts = range(CONFIG.moe.num_experts)
    stem = "model.layers.2.mlp.experts."
    made = {
        "mlp.experts.gate_up_proj": torch.stack(
            [torch.cat([ours[f"{stem}{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in experts]
        ),
        "mlp.experts.down_proj": torch.stack([ours[f"{stem}{e}.down_proj.weight"] for e in experts]),
    }
    return {name: made[name] if name in made else ours[f"model.layers.2.{name}"] for name in wanted}


MOE = MoeConfig(num_experts=8, num_shared=0, top_k=2, intermediate_size=4, num_groups=4, top_k_groups=2)


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ([0.9, 0.1, 0.6, 0.5, 0.4, 0.4, 0.0, 0.0], [0, 2]),  # groups by the sum of two: (0.9+0.1), (0.6+0.5)
        ([-0.1, -0.2, -0.9, -0.9, -0.3, -0.4, -0.9, -0.9], [0, 1]),  # a masked expert never wins with negative scores
        ([0.5] * 8, [0, 1]),  # ties: lower ids
    ],
)
def test_the_gates_choice(scores: list[float], chosen: list[int]) -> None:
    assert choose_experts(torch.tensor([scores]), MOE)[0].tolist() == chosen


def test_the_bias_chooses_and_does_not_weigh() -> None:
    model = tiny_v3(1).eval()
    gate = model.model.layers[1].mlp.gate
    x = torch.randn(5, CONFIG.hidden_size)
    gate.e_score_correction_bias.zero_()
    gate.e_score_correction_bias[:2] = 9.0
    ids, weights = gate(x)
    assert ids.tolist() == [[0, 1]] * 5
    scores = torch.sigmoid(x @ gate.weight.T)[:, :2]
    torch.testing.assert_close(weights, 1.5 * scores / scores.sum(-1, keepdim=True))


def test_balance_moves_the_bias_towards_equal_load() -> None:
    gate = tiny_v3(1).model.layers[1].mlp.gate
    gate.e_score_correction_bias.zero_()
    gate.balance(torch.tensor([4, 0, 2, 2, 2, 2, 2, 2]), 0.001)
    assert gate.e_score_correction_bias.tolist() == pytest.approx([-0.001, 0.001, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("config", "mtp"),
    [
        (replace(CONFIG, tie_word_embeddings=True), MtpConfig()),
        (CONFIG, MtpConfig(norm_flavour="1+w")),
        (CONFIG, MtpConfig(final_norm_owner="none")),
        (CONFIG, MtpConfig(draft_vocab_size=8)),
    ],
)
def test_what_training_cannot_do_is_refused(config: DeepseekConfig, mtp: MtpConfig) -> None:
    with pytest.raises(ValueError, match="training supports"):
        V3Model(config, mtp)

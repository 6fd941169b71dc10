"""The plain reference: no cache, no pages, no batch, no drafts. Slow and obvious; the engine's text must equal its.

Shapes: T tokens, d hidden, V vocabulary, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.config import LlamaConfig, MtpConfig
from seqmtp_serve.request import Request
from seqmtp_serve.speculation.chain import select_chain
from seqmtp_serve.speculation.row_params import RowParams

Tensors = Mapping[str, Tensor]


def forward(tensors: Tensors, config: LlamaConfig, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits `[T, V]` and pre-final-norm hidden rows `[T, d]` of a whole sequence."""
    hidden_Td = tensors["model.embed_tokens.weight"].float()[torch.tensor(token_ids)]
    for layer in range(config.num_layers):
        hidden_Td = block(tensors, f"model.layers.{layer}.", config, hidden_Td, torch.arange(len(token_ids)))
    return logits(tensors, config, hidden_Td), hidden_Td


def generate(tensors: Tensors, config: LlamaConfig, request: Request) -> list[int]:
    """The request's output tokens, up to and with a stop token, decoded one whole forward at a time."""
    params, output = request.params, list[int]()
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
    while len(output) < params.max_tokens and not (output and output[-1] in stops):
        known = [*request.prompt_ids, *output]
        last_V = forward(tensors, config, known)[0][-1]
        none_BK = torch.empty(1, 0, dtype=torch.int64)
        row = select_chain(last_V[None, None], none_BK, [0], None, RowParams.of_requests([request]), [len(known)])
        output += row.tokens[0]
    return output


def draft_greedily(
    tensors: Tensors,
    config: LlamaConfig,
    mtp: MtpConfig,
    token_ids: Sequence[int],
    hidden_Td: Tensor,
    depth: int,
) -> list[int]:
    """The chain a depth-one module proposes after `token_ids`, given the target's rows of all but the last token.

    Every step computes all rows again: the fed ones, and the recycled ones made so far.
    """
    prefix = f"model.layers.{config.num_layers}."
    draft_ids = tensors.get(f"{prefix}draft_token_ids", torch.arange(config.vocab_size)).long()
    inputs, next_ids, chain = [*hidden_Td], list(token_ids[1:]), list[int]()
    for _ in range(depth):
        output_d = mtp_rows(tensors, config, mtp, torch.stack(inputs), next_ids)[-1]
        chain.append(int(draft_ids[logits(tensors, config, output_d[None])[0][draft_ids].argmax()]))
        inputs.append(output_d)
        next_ids.append(chain[-1])
    return chain


def mtp_rows(
    tensors: Tensors, config: LlamaConfig, mtp: MtpConfig, hidden_Td: Tensor, next_ids: Sequence[int]
) -> Tensor:
    """The module's outputs `[T, d]` for bases 0 .. T-1 (pre-norm contract, fusion order "eh")."""
    assert (mtp.fusion_order, mtp.fed_hidden, mtp.recycled_hidden, mtp.norm_flavour) == ("eh", "pre", "pre", "w")
    prefix = f"model.layers.{config.num_layers}."
    embedded_Td = tensors["model.embed_tokens.weight"].float()[torch.tensor(next_ids)]
    enorm_Td = rms_norm(embedded_Td, tensors[f"{prefix}enorm.weight"], config)
    hnorm_Td = rms_norm(hidden_Td, tensors[f"{prefix}hnorm.weight"], config)
    fused_Td = torch.cat((enorm_Td, hnorm_Td), -1) @ tensors[f"{prefix}eh_proj.weight"].float().T
    return block(tensors, prefix, config, fused_Td, torch.arange(len(next_ids)))


def block(tensors: Tensors, prefix: str, config: LlamaConfig, hidden_Td: Tensor, positions_T: Tensor) -> Tensor:
    """One causal decoder block over a whole sequence."""

    def project(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{prefix}{name}.weight"].float().T

    def heads(name: str, x: Tensor) -> Tensor:
        return project(name, x).view(len(x), -1, config.head_dim).transpose(0, 1)

    x = rms_norm(hidden_Td, tensors[f"{prefix}input_layernorm.weight"], config)
    q_HTD = rotate_half(heads("self_attn.q_proj", x), positions_T, config)
    k_GTD = rotate_half(heads("self_attn.k_proj", x), positions_T, config)
    v_GTD = heads("self_attn.v_proj", x)
    k_HTD, v_HTD = (each.repeat_interleave(config.num_query_groups, 0) for each in (k_GTD, v_GTD))
    scores_HTT = q_HTD @ k_HTD.transpose(-1, -2) * config.head_dim**-0.5
    scores_HTT = scores_HTT.masked_fill(torch.ones_like(scores_HTT, dtype=torch.bool).triu(1), float("-inf"))
    mixed_HTD = torch.softmax(scores_HTT, -1) @ v_HTD
    hidden_Td = hidden_Td + project("self_attn.o_proj", mixed_HTD.transpose(0, 1).flatten(1))
    x = rms_norm(hidden_Td, tensors[f"{prefix}post_attention_layernorm.weight"], config)
    return hidden_Td + project("mlp.down_proj", F.silu(project("mlp.gate_proj", x)) * project("mlp.up_proj", x))


def rotate_half(x_HTD: Tensor, positions_T: Tensor, config: LlamaConfig) -> Tensor:
    """RoPE as Hugging Face llama: dimension j pairs with j + D/2."""
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angle_TD = (positions_T[:, None] * frequency).repeat(1, 2)
    low, high = x_HTD.chunk(2, -1)
    return x_HTD * angle_TD.cos().float() + torch.cat((-high, low), -1) * angle_TD.sin().float()


def rms_norm(x: Tensor, gain_d: Tensor, config: LlamaConfig) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * gain`."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_eps) * gain_d.float()


def logits(tensors: Tensors, config: LlamaConfig, hidden_Td: Tensor) -> Tensor:
    """Final norm, then the head."""
    head_Vd = tensors["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"].float()
    return rms_norm(hidden_Td, tensors["model.norm.weight"], config) @ head_Vd.T

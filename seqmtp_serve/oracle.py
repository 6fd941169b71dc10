"""The plain reference: no cache, no pages, no batch, no drafts. Slow and obvious; the engine's text must equal its.

Llama blocks are here, DeepSeek-V3 blocks in `oracle_latent.py`. Everything is computed in the precision of the hidden
rows: float32, or float64 where `forward` is asked for it.

Shapes: T tokens, d hidden, V vocabulary, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from seqmtp_serve.model.config import LlamaConfig, MtpConfig
from seqmtp_serve.model.deepseek_config import DeepseekConfig
from seqmtp_serve.oracle_latent import feed_forward, latent_attention
from seqmtp_serve.request import Request
from seqmtp_serve.speculation.chain import select_chain
from seqmtp_serve.speculation.plain_shaping import plain_shaped
from seqmtp_serve.speculation.row_params import RowParams

Tensors = Mapping[str, Tensor]
Config = LlamaConfig | DeepseekConfig


def forward(
    tensors: Tensors, config: Config, token_ids: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Logits `[T, V]` and pre-final-norm hidden rows `[T, d]` of a whole sequence."""
    hidden_Td = tensors["model.embed_tokens.weight"].to(dtype)[torch.tensor(token_ids)]
    for layer in range(config.num_layers):
        hidden_Td = block(tensors, f"model.layers.{layer}.", config, hidden_Td, torch.arange(len(token_ids)))
    return logits(tensors, config, hidden_Td), hidden_Td


def generate(tensors: Tensors, config: Config, request: Request) -> list[int]:
    """The request's output tokens, up to and with a stop token, decoded one whole forward at a time."""
    params, output = request.params, list[int]()
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
    while len(output) < params.max_tokens and not (output and output[-1] in stops):
        known = [*request.prompt_ids, *output]
        last_V = forward(tensors, config, known)[0][-1]
        if params.shaping is not None:
            last_V = torch.tensor(plain_shaped(last_V.tolist(), params.shaping, request.prompt_ids, output))
        none_BK = torch.empty(1, 0, dtype=torch.int64)
        row = select_chain(last_V[None, None], none_BK, [0], None, RowParams.of_requests([request]), [len(known)])
        output += row.tokens[0]
    return output


def draft_greedily(
    tensors: Tensors,
    config: Config,
    mtp: MtpConfig,
    token_ids: Sequence[int],
    hidden_Td: Tensor,
    depth: int,
) -> list[int]:
    """The drafts after `token_ids`, given the target's rows of all but the last token; see `MtpConfig.rollout`.

    Every step computes all rows of its module again. The first lap over the modules is the chain of training: depth k
    reads depth k-1 at the same bases, one token on. Later laps append a row, at the position of its newest token but
    one, to those the module has seen.
    """
    known, chain, num_rows = list(token_ids), list[int](), len(token_ids) - 1
    draft_ids = tensors.get(f"model.layers.{config.num_layers}.draft_token_ids", torch.arange(config.vocab_size)).long()
    steps = min(depth, mtp.num_modules) if mtp.rollout == "chain" else depth
    inputs: dict[int, list[tuple[Tensor, int, int]]] = {}  # module -> (hidden row, next token, position)
    fed_Td = hidden_Td if mtp.fed_hidden == "pre" else norm_rows(tensors, "model.norm.weight", hidden_Td, config)
    for step in range(steps):
        lap, module = divmod(step, mtp.num_modules)
        if lap == 0:
            inputs[module] = [(fed_Td[base], known[base + module + 1], base) for base in range(num_rows)]
        else:
            inputs[module].append((fed_Td[-1], known[-1], num_rows - 1 + lap * mtp.num_modules))
        hidden, next_ids, positions = zip(*inputs[module], strict=True)
        output_Td = mtp_rows(tensors, config, mtp, torch.stack(hidden), next_ids, list(positions), module=module)
        normed_Td = mtp_final_norm(tensors, config, mtp, output_Td, module)
        scores_V = normed_Td[-1] @ head(tensors, config).to(normed_Td.dtype).T
        chain.append(int(draft_ids[scores_V[draft_ids].argmax()]))
        known.append(chain[-1])
        fed_Td = output_Td if mtp.recycled_hidden == "pre" else normed_Td
    return chain


def mtp_rows(
    tensors: Tensors,
    config: Config,
    mtp: MtpConfig,
    consumed_Td: Tensor,
    next_ids: Sequence[int],
    positions: Sequence[int] | None = None,
    *,
    module: int = 0,
) -> Tensor:
    """A module's outputs `[T, d]` for hidden rows as it consumes them (fusion order "eh"). Positions: 0 .. T-1."""
    assert (mtp.fusion_order, mtp.norm_flavour, mtp.zero_position0) == ("eh", "w", False)
    prefix = f"model.layers.{config.num_layers + module}."
    embedded_Td = tensors["model.embed_tokens.weight"].to(consumed_Td.dtype)[torch.tensor(next_ids)]
    enorm_Td = norm_rows(tensors, f"{prefix}enorm.weight", embedded_Td, config)
    hnorm_Td = norm_rows(tensors, f"{prefix}hnorm.weight", consumed_Td, config)
    eh_proj = tensors[f"{prefix}eh_proj.weight"].to(consumed_Td.dtype)
    positions_T = torch.arange(len(next_ids)) if positions is None else torch.tensor(positions)
    return block(tensors, prefix, config, torch.cat((enorm_Td, hnorm_Td), -1) @ eh_proj.T, positions_T)


def mtp_final_norm(tensors: Tensors, config: Config, mtp: MtpConfig, output_Td: Tensor, module: int = 0) -> Tensor:
    """The norm before the head, whoever owns it."""
    if mtp.final_norm_owner == "none":
        return output_Td
    own = f"model.layers.{config.num_layers + module}.shared_head.norm.weight"
    return norm_rows(tensors, own if mtp.final_norm_owner == "mtp" else "model.norm.weight", output_Td, config)


def block(tensors: Tensors, prefix: str, config: Config, hidden_Td: Tensor, positions_T: Tensor) -> Tensor:
    """One causal decoder block over a whole sequence."""
    x_Td = norm_rows(tensors, f"{prefix}input_layernorm.weight", hidden_Td, config)
    if isinstance(config, DeepseekConfig):
        hidden_Td = hidden_Td + latent_attention(tensors, prefix, config, x_Td, positions_T)
        x_Td = norm_rows(tensors, f"{prefix}post_attention_layernorm.weight", hidden_Td, config)
        return hidden_Td + feed_forward(tensors, prefix, config, x_Td)
    hidden_Td = hidden_Td + grouped_attention(tensors, prefix, config, x_Td, positions_T)
    x_Td = norm_rows(tensors, f"{prefix}post_attention_layernorm.weight", hidden_Td, config)
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"].to(x_Td.dtype) for name in ("gate", "up", "down"))
    return hidden_Td + (F.silu(x_Td @ gate.T) * (x_Td @ up.T)) @ down.T


def grouped_attention(tensors: Tensors, prefix: str, config: LlamaConfig, x_Td: Tensor, positions_T: Tensor) -> Tensor:
    """Causal grouped-query attention over a whole sequence, `[T, d]`, without norm and residual."""

    def heads(name: str) -> Tensor:
        out = x_Td @ tensors[f"{prefix}self_attn.{name}.weight"].to(x_Td.dtype).T
        return out.view(len(x_Td), -1, config.head_dim).transpose(0, 1)

    q_HTD = rotate_half(heads("q_proj"), positions_T, config)
    k_GTD = rotate_half(heads("k_proj"), positions_T, config)
    k_HTD, v_HTD = (each.repeat_interleave(config.num_query_groups, 0) for each in (k_GTD, heads("v_proj")))
    scores_HTT = q_HTD @ k_HTD.transpose(-1, -2) * config.head_dim**-0.5
    scores_HTT = scores_HTT.masked_fill(torch.ones_like(scores_HTT, dtype=torch.bool).triu(1), float("-inf"))
    mixed_HTD = torch.softmax(scores_HTT, -1) @ v_HTD
    return mixed_HTD.transpose(0, 1).flatten(1) @ tensors[f"{prefix}self_attn.o_proj.weight"].to(x_Td.dtype).T


def rotate_half(x_HTD: Tensor, positions_T: Tensor, config: LlamaConfig) -> Tensor:
    """RoPE as Hugging Face llama: dimension j pairs with j + D/2."""
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angle_TD = (positions_T[:, None] * frequency).repeat(1, 2)
    low, high = x_HTD.chunk(2, -1)
    cos, sin = (each.to(x_HTD.dtype) for each in (angle_TD.cos(), angle_TD.sin()))
    return x_HTD * cos + torch.cat((-high, low), -1) * sin


def norm_rows(tensors: Tensors, name: str, x: Tensor, config: Config) -> Tensor:
    """The RMSNorm whose gain is stored as `name`."""
    return rms_norm(x, tensors[name], config)


def rms_norm(x: Tensor, gain_d: Tensor, config: Config) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * gain`."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_eps) * gain_d.to(x.dtype)


def head(tensors: Tensors, config: Config) -> Tensor:
    """`[V, d]`: the embedding when the two are tied."""
    return tensors["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]


def logits(tensors: Tensors, config: Config, hidden_Td: Tensor) -> Tensor:
    """Final norm, then the head."""
    return norm_rows(tensors, "model.norm.weight", hidden_Td, config) @ head(tensors, config).to(hidden_Td.dtype).T

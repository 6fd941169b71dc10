"""The depth-one MTP module being fitted: two norms, a fusion, one llama block. Embedding, final norm and head are the
target's own.

Row of base i (DeepSeek-V3 report, arXiv 2412.19437, section 2.2, with k = 1): it consumes the target's pre-final-norm
hidden h_i and the embedding of x_{i+1}, and predicts x_{i+2}. ``eh_proj`` sees ``[enorm(E(x_{i+1})) ; hnorm(h_i)]``
(fusion order ``eh``), the rotary position is the base i, the block's output before any norm is what a further step is
fed with. Rotary halves are stored as Hugging Face llama checkpoints store them (``rotate_half``).

Shapes: B documents, T bases, Q wanted bases, M chains, H heads, G KV heads, D head size, d hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from seqmtp_serve.model.config import LlamaConfig
from seqmtp_serve.training.draft_module import DraftModule, Rows, attend_chain, attend_first
from seqmtp_serve.training.target import rms_norm, rope_tables


class RowNorm(nn.Module):
    """RMSNorm with a plain gain, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), self.weight, self.eps)


class Attention(nn.Module):
    """The four projections of a GQA block."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        d, kv = shape.hidden_size, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(d, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(d, kv, bias=False)
        self.v_proj = nn.Linear(d, kv, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, d, bias=False)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MtpModule(DraftModule):
    """Parameters carry the released layout's names below ``model.layers.<id>.``."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.shape = shape
        d, eps = shape.hidden_size, shape.rms_eps
        self.enorm, self.hnorm = RowNorm(d, eps), RowNorm(d, eps)
        self.eh_proj = nn.Linear(2 * d, d, bias=False)
        self.input_layernorm, self.post_attention_layernorm = RowNorm(d, eps), RowNorm(d, eps)
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)

    def first_step(
        self, hidden_BTd: torch.Tensor, embed_BTd: torch.Tensor, wanted_BQ: torch.Tensor
    ) -> tuple[torch.Tensor, Rows]:
        """Step-1 rows: keys and values of all bases 0..T-1, outputs ``[B, Q, d]`` of the wanted bases only.

        The rows that are only attended to (a prompt's) skip queries, attention and the MLP.
        """
        docs_B1 = torch.arange(len(hidden_BTd))[:, None]
        residual_BTd, inner_BTd = self._fuse(hidden_BTd, embed_BTd)
        keys, values = self._keys_values(inner_BTd, torch.arange(hidden_BTd.shape[1])[None])
        queries = self._queries(inner_BTd[docs_B1, wanted_BQ], wanted_BQ)
        rows = Rows(keys=keys, values=values)
        mixed = attend_first(queries, rows, wanted_BQ, self.shape.softmax_scale)
        return self._finish(residual_BTd[docs_B1, wanted_BQ], mixed), rows

    def next_step(
        self, hidden_BMd: torch.Tensor, embed_BMd: torch.Tensor, starts_BM: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """See `DraftModule`; the row fed is the step before's, as it is."""
        residual_BMd, inner_BMd = self._fuse(hidden_BMd, embed_BMd)
        bases_BM = starts_BM + len(rows.chain) + 1
        rows.chain.append(self._keys_values(inner_BMd, bases_BM))
        mixed = attend_chain(self._queries(inner_BMd, bases_BM), rows, starts_BM, self.shape.softmax_scale)
        return self._finish(residual_BMd, mixed)

    def _fuse(self, hidden: torch.Tensor, embed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.eh_proj(torch.cat((self.enorm(embed), self.hnorm(hidden)), -1)).float()
        return residual, self.input_layernorm(residual)

    def _queries(self, inner: torch.Tensor, bases: torch.Tensor) -> torch.Tensor:
        return self._turn(self._heads(self.self_attn.q_proj(inner)), bases)

    def _keys_values(self, inner: torch.Tensor, bases: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attn = self.self_attn
        return self._turn(self._heads(attn.k_proj(inner)), bases), self._heads(attn.v_proj(inner))

    def _heads(self, x_BTO: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(x_BTO, -1, (-1, self.shape.head_dim)).transpose(1, 2)

    def _turn(self, x_BHTD: torch.Tensor, bases_BT: torch.Tensor) -> torch.Tensor:
        cos, sin = rope_tables(bases_BT.reshape(-1), self.shape)
        cos, sin = (table.view(*bases_BT.shape, -1)[:, None] for table in (cos, sin))
        low, high = x_BHTD.chunk(2, -1)
        return (x_BHTD * cos + torch.cat((-high, low), -1) * sin).to(x_BHTD.dtype)

    def _finish(self, residual: torch.Tensor, mixed_heads: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.self_attn.o_proj(mixed_heads.transpose(1, 2).flatten(2))
        residual = residual + attended.float()
        thought: torch.Tensor = self.mlp(self.post_attention_layernorm(residual))
        return residual + thought.float()


def module_from_last_layer(shape: LlamaConfig, tensors: Mapping[str, torch.Tensor]) -> MtpModule:
    """A module whose block is the target's last layer, with a fusion that passes the hidden row through.

    ``eh_proj`` starts as ``[0 | I]`` and the norms' gains as 1.
    """
    module = MtpModule(shape)
    prefix = f"model.layers.{shape.num_layers - 1}."
    own = module.state_dict()
    for name in own:
        if (stored := tensors.get(prefix + name)) is not None:
            own[name] = stored.clone()
    d = shape.hidden_size
    own["eh_proj.weight"] = torch.cat((torch.zeros(d, d), torch.eye(d)), 1)
    module.load_state_dict(own)
    return module

"""Acceptance of sampled drafts by position, on text the target itself sampled at the same temperature.

A server draws y from q and accepts it with probability min(1, p(y) / q(y)) (Leviathan et al., arXiv 2211.17192). Where
the text went on with x, drawn from p, the proposal was x and accepted with probability min(q(x), p(x)) / p(x): the
mean over x is the sum of min(p, q), what a server accepts. A proposal counts only behind accepted ones, so chains are
fed with the text's own tokens.

Shapes: Q bases, K depths, V columns of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from seqmtp_serve.speculation.prompt_lookup import SAMPLED
from seqmtp_serve.training.acceptance import Acceptance, no_rounds, walk
from seqmtp_serve.training.batches import first_counted_base
from seqmtp_serve.training.draft_module import DraftModule
from seqmtp_serve.training.loss import Frozen
from seqmtp_serve.training.shards import Document
from seqmtp_serve.training.target import rms_norm

NOT_ACCEPTED = 0x10FFFF  # in the place of a token: none has this id


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How both draw. A draft comes from the `top_n` likeliest of its own, renormalised (`speculation/draft.py`)."""

    temperature: float
    top_n: int = 16


Logits = Callable[[torch.Tensor], torch.Tensor]  # the target's, [N, vocabulary], from rows before its final norm


@torch.no_grad()
def chances(
    module: DraftModule,
    doc: Document,
    frozen: Frozen,
    draft_token_ids: torch.Tensor,
    target_logits: Logits,
    sampling: Sampling,
    *,
    depth: int,
) -> torch.Tensor:
    """``[Q, K]``: how likely proposal k of each counted base was the text's token and accepted, those before it being.

    0 where the text ends before.
    """
    first, num_rows = first_counted_base(doc), len(doc.tokens) - 1
    bases_1Q = torch.arange(first, num_rows)[None]
    embed = frozen.embed_Vd[doc.tokens[1:]].float()
    fed_1Qd, rows = module.first_step(doc.hidden[None, :num_rows], embed[None], bases_1Q)
    p_R = _chosen(target_logits(doc.hidden[first:num_rows]), doc.tokens[first + 1 :], sampling)  # of token first+1+r
    found = []
    for step in range(depth):
        newest_Q = bases_1Q[0] + 1 + step  # the token a step consumes
        if step:
            tokens_Q = doc.tokens[newest_Q.clamp(max=num_rows)]
            fed_1Qd = module.next_step(fed_1Qd, frozen.embed_Vd[tokens_Q].float()[None], bases_1Q, rows)
        logits_QV = rms_norm(fed_1Qd[0], frozen.norm_d, frozen.norm_eps).to(frozen.head_Vd.dtype) @ frozen.head_Vd.T
        num_inside = max(0, len(newest_Q) - 1 - step)
        wanted_N = doc.tokens[newest_Q[:num_inside] + 1]
        q_N = _drafted(logits_QV[:num_inside].float(), draft_token_ids.long(), wanted_N, sampling)
        p_N = p_R[1 + step : 1 + step + num_inside]
        chance_Q = torch.zeros(len(newest_Q))
        chance_Q[:num_inside] = (q_N / p_N).clamp(max=1.0)
        found.append(chance_Q)
    return torch.stack(found, -1)


def drawn(chance_QK: torch.Tensor, doc: Document, generator: torch.Generator) -> list[list[int]]:
    """Chains as `walk` takes them: the text's own tokens as far as a draw accepts them."""
    first = first_counted_base(doc)
    accepted_QK = torch.rand(chance_QK.shape, generator=generator) < chance_QK
    place_QK = first + 2 + torch.arange(len(chance_QK))[:, None] + torch.arange(chance_QK.shape[1])
    tokens_QK = doc.tokens[place_QK.clamp(max=len(doc.tokens) - 1)]
    chains: list[list[int]] = tokens_QK.masked_fill(~accepted_QK, NOT_ACCEPTED).tolist()
    return chains


def measure_sampled(
    module: DraftModule,
    documents: Sequence[Document],
    frozen: Frozen,
    draft_token_ids: torch.Tensor,
    target_logits: Logits,
    sampling: Sampling,
    *,
    depth: int = 3,
    prompt_lookup: bool = False,
    seed: int = 0,
) -> list[Acceptance]:
    """One entry a document that was sampled so. A copied token is certain: it is accepted where the text has it."""
    generator, results = torch.Generator().manual_seed(seed), list[Acceptance]()
    first_rates = SAMPLED if prompt_lookup else None
    for doc in documents:
        chance_QK = chances(module, doc, frozen, draft_token_ids, target_logits, sampling, depth=depth)
        chains = drawn(chance_QK, doc, generator)
        tokens, first = doc.tokens.tolist(), first_counted_base(doc)
        results.append(walk(tokens, chains, first, first_rates=first_rates) if chains else no_rounds(depth))
    return results


def _chosen(logits_NV: torch.Tensor, tokens_N: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    return (logits_NV.float() / sampling.temperature).softmax(-1).gather(-1, tokens_N[:, None])[:, 0]


def _drafted(
    logits_NV: torch.Tensor, token_ids_V: torch.Tensor, wanted_N: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """The wanted tokens' probability in a draft's own distribution."""
    top_NS, column_NS = (logits_NV / sampling.temperature).topk(min(sampling.top_n, logits_NV.shape[-1]), dim=-1)
    return (top_NS.softmax(-1) * (token_ids_V[column_NS] == wanted_N[:, None])).sum(-1)

"""Greedy acceptance by position through recurrent rollout, on text the target itself wrote greedily.

The target's greedy text is fixed, so every possible round can be looked at in one pass: for each base b the chain
started there proposes y1..yK from the target rows of bases <= b, and its first m proposals equal the text. Walking the
text with these m (a round moves m + 1 tokens) gives the acceptance a server would see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from seqmtp_serve.speculation.prompt_lookup import GREEDY, FirstRates, PromptLookup
from seqmtp_serve.training.batches import first_counted_base
from seqmtp_serve.training.draft_module import DraftModule
from seqmtp_serve.training.loss import Frozen
from seqmtp_serve.training.shards import Document
from seqmtp_serve.training.target import rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """``by_position[k]``: share of the full rounds in which proposals 0..k were all accepted (unconditional)."""

    num_rounds: int
    accepted: tuple[int, ...]

    @property
    def by_position(self) -> tuple[float, ...]:
        return tuple(count / max(1, self.num_rounds) for count in self.accepted)

    @property
    def expected_progress(self) -> float:
        """E[R]: tokens a round, the correction or bonus included."""
        return 1 + sum(self.by_position)

    def __add__(self, other: Acceptance) -> Acceptance:
        accepted = tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True))
        return Acceptance(num_rounds=self.num_rounds + other.num_rounds, accepted=accepted)


Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits [N, V], positions [N] -> columns [N]


def best(logits_NV: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """Greedy drafts; ties go to the first column."""
    return logits_NV.argmax(-1)


@torch.no_grad()
def proposals(
    module: DraftModule,
    doc: Document,
    frozen: Frozen,
    draft_token_ids: torch.Tensor,
    *,
    depth: int,
    choose: Choose = best,
) -> torch.Tensor:
    """What a chain started at each counted base proposes, ``[bases, depth]`` ids, fed with its own tokens."""
    first, num_rows = first_counted_base(doc), len(doc.tokens) - 1
    bases_1Q = torch.arange(first, num_rows)[None]
    embed = frozen.embed_Vd[doc.tokens[1:]].float()
    fed_1Qd, rows = module.first_step(doc.hidden[None, :num_rows], embed[None], bases_1Q)
    chosen: list[torch.Tensor] = []
    for step in range(depth):
        if step:
            fed_1Qd = module.next_step(fed_1Qd, frozen.embed_Vd[chosen[-1]].float()[None], bases_1Q, rows)
        logits_QV = rms_norm(fed_1Qd[0], frozen.norm_d, frozen.norm_eps).to(frozen.head_Vd.dtype) @ frozen.head_Vd.T
        chosen.append(draft_token_ids.long()[choose(logits_QV.float(), bases_1Q[0] + 2 + step)])
    return torch.stack(chosen, -1)


def walk(
    tokens: Sequence[int], proposed: Sequence[Sequence[int]], first_base: int, *, first_rates: FirstRates | None = None
) -> Acceptance:
    """Play the rounds; only rounds with a full chain of text left count, so stops do not shorten a chain.

    `first_rates`: a round's drafts may be a copy, as a target would decide that begins with these.
    """
    depth = len(proposed[0]) if proposed else 0
    accepted, num_rounds, base = [0] * depth, 0, first_base
    lookup = None if first_rates is None else PromptLookup(tokens[: base + 2], first_rates=first_rates)
    while base + 1 + depth < len(tokens):
        chain = proposed[base - first_base]
        if lookup is not None:
            copy = lookup.find(depth)
            if copy is None:
                lookup.module_drafted(chain[0])
            chain = chain if copy is None else copy.tokens
        matched = 0
        while matched < depth and chain[matched] == tokens[base + 2 + matched]:
            accepted[matched] += 1
            matched += 1
        num_rounds += 1
        base += matched + 1
        if lookup is not None:
            lookup.extend(tokens[base + 1 - matched : base + 2])
    return Acceptance(num_rounds=num_rounds, accepted=tuple(accepted))


def measure(
    module: DraftModule,
    documents: Sequence[Document],
    frozen: Frozen,
    draft_token_ids: torch.Tensor,
    *,
    depth: int = 3,
    prompt_lookup: bool = False,
) -> list[Acceptance]:
    """One entry a document (greedy ones only make sense)."""
    results, first_rates = [], GREEDY if prompt_lookup else None
    for doc in documents:
        chains = proposals(module, doc, frozen, draft_token_ids, depth=depth).tolist()
        tokens, first = doc.tokens.tolist(), first_counted_base(doc)
        results.append(walk(tokens, chains, first, first_rates=first_rates) if chains else no_rounds(depth))
    return results


def no_rounds(depth: int) -> Acceptance:
    return Acceptance(num_rounds=0, accepted=(0,) * depth)


def total(results: Sequence[Acceptance], depth: int = 3) -> Acceptance:
    """All rounds of all documents together."""
    return sum(results, no_rounds(depth))

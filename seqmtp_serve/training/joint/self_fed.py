"""How deep a run's drafts hold when they feed on themselves: on the model's own text, as a server would draft.

The text is the main model's continuation of held-out prompts, greedy or seeded at a temperature, so its next choice is
always the next token: speculation never changes a text. Chains are drafted from every position, and the text is walked
in rounds as a server moves through it; a draft counts only when all before it were right. This is another figure than
the teacher-forced one of `evaluate.py`, and is reported apart.

One recurrent module is drafted with in bulk (`ChainedLayer`); any other configuration, and the tests of the bulk form,
use the plain reference, a chain at a time.

Shapes: N rows, V vocabulary, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqmtp_serve.errors import BadCorpus, TrainingError
from seqmtp_serve.oracle import draft_greedily
from seqmtp_serve.request import SamplingParams
from seqmtp_serve.speculation.choose import coupled_tokens
from seqmtp_serve.speculation.row_params import RowParams
from seqmtp_serve.training.acceptance import Choose, best, proposals, total, walk
from seqmtp_serve.training.batches import first_counted_base
from seqmtp_serve.training.joint.continuations import ChooseNext, best_next, continued, places, prompt_at
from seqmtp_serve.training.joint.corpus import Corpus
from seqmtp_serve.training.loss import Frozen
from seqmtp_serve.training.shards import Document
from seqmtp_serve.training.v3.chained import ChainedLayer, can_chain
from seqmtp_serve.training.v3.model import V3Model

_TOGETHER = 64  # replies made at a time


def self_fed(
    model: V3Model,
    corpus: Corpus,
    *,
    prompts: int,
    prompt_len: int,
    reply_len: int,
    depth: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Unconditional acceptance by position over the rounds of the replies, and E[R] = 1 + its sum.

    `prompts` prompts are spread evenly over the corpus; reply b is that of choice b. Raises BadCorpus when no document
    is longer than a prompt, TrainingError for a temperature where only the plain reference drafts.
    """
    possible = places(corpus, prompt_len, prompt_len)
    if temperature and not can_chain(model):
        raise TrainingError("seeded chains are drafted with one recurrent module only; evaluate at temperature 0")
    if not possible:
        raise BadCorpus(f"no document is longer than a prompt of {prompt_len} tokens")
    chosen = possible[:: max(1, len(possible) // prompts)][:prompts]
    accepted = []
    for start in range(0, len(chosen), _TOGETHER):
        texts = [prompt_at(corpus, place, prompt_len) for place in chosen[start : start + _TOGETHER]]
        choices = list(range(start, start + len(texts)))
        choose = next_token(temperature, seed, choices)
        for choice, (tokens, states) in zip(
            choices, continued(model, texts, choose, reply_len=reply_len, stop_loops=False), strict=True
        ):
            document = Document(tokens=tokens, hidden=states, prompt_len=prompt_len, greedy=not temperature)
            chains = drafted(model, document, depth, draft_token(temperature, seed, choice))
            accepted.append(walk(tokens.tolist(), chains, first_counted_base(document)))
    found = total(accepted, depth)
    return {
        "fed": "self-fed",
        "rollout": model.mtp.rollout,
        "text": f"the main model's own replies, seeded at temperature {temperature}"
        if temperature
        else "the main model's own greedy replies",
        "prompts": len(chosen),
        "rounds": found.num_rounds,
        "by_position": list(found.by_position),
        "e_r": found.expected_progress,
    }


def drafted(model: V3Model, document: Document, depth: int, choose: Choose) -> list[list[int]]:
    """The chain of every counted base."""
    if not can_chain(model):
        assert choose is best, "the plain reference drafts greedily"
        return plainly_drafted(model, document, depth)
    everything = torch.arange(model.config.vocab_size)
    chains: list[list[int]] = proposals(
        ChainedLayer(model), document, frozen_parts(model, torch.float32), everything, depth=depth, choose=choose
    ).tolist()
    return chains


def plainly_drafted(model: V3Model, document: Document, depth: int) -> list[list[int]]:
    """The same, greedily, a chain at a time: each computes all rows of the module again."""
    tensors, text = model.state_dict(), document.tokens.tolist()
    return [
        draft_greedily(tensors, model.config, model.mtp, text[: base + 2], document.hidden[: base + 1], depth)
        for base in range(first_counted_base(document), len(text) - 1)
    ]


def frozen_parts(model: V3Model, products: torch.dtype) -> Frozen:
    """The main model's own parts that drafting reads, without gradients."""
    return Frozen(
        embed_Vd=model.model.embed_tokens.weight.detach(),
        norm_d=model.model.norm.weight.detach(),
        head_Vd=model.lm_head.weight.detach().to(products),
        norm_eps=model.config.rms_eps,
    )


def next_token(temperature: float, seed: int, choices: Sequence[int]) -> ChooseNext:
    """How the text's tokens are chosen: greedily, or seeded as a server samples them, one choice index a sequence."""
    if not temperature:
        return best_next
    params = RowParams.stack([(_seeded(temperature, seed), choice) for choice in choices])

    def choose(logits_BV: Tensor, position: int) -> Tensor:
        return coupled_tokens(logits_BV, params, torch.full((len(logits_BV),), position))

    return choose


def draft_token(temperature: float, seed: int, choice: int) -> Choose:
    """The draft's side of the same: the noise of a position is shared (the coupled contract)."""
    if not temperature:
        return best

    def choose(logits_NV: Tensor, positions_N: Tensor) -> Tensor:
        params = RowParams.stack([(_seeded(temperature, seed), choice)] * len(logits_NV))
        return coupled_tokens(logits_NV, params, positions_N)

    return choose


def _seeded(temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, seeded=True)

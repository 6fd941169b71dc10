"""How deep a run's drafts hold when they feed on themselves: on the model's own greedy text, as a server would draft.

The text is the main model's greedy continuation of held-out prompts, so its next choice is always the next token. From
each position a chain is drafted by the plain reference; a draft counts only when all before it were right. This is
another figure than the teacher-forced one of `evaluate.py`, and is reported apart.
"""

from __future__ import annotations

from typing import Any

import torch

from seqmtp_serve.oracle import draft_greedily
from seqmtp_serve.training.joint.corpus import Corpus
from seqmtp_serve.training.packing import main_tensors, pack
from seqmtp_serve.training.v3.model import V3Model


@torch.no_grad()
def self_fed(
    model: V3Model, corpus: Corpus, *, prompts: int, prompt_len: int, reply_len: int, depth: int
) -> dict[str, Any]:
    """Unconditional acceptance by position over every round start in the replies, and E[R] = 1 + its sum.

    Takes the first `prompts` documents that are longer than `prompt_len`. Costs about rounds * positions module rows.
    """
    tensors, accepted, rounds = model.state_dict(), [0] * depth, 0
    long_enough = [index for index in range(len(corpus)) if len(corpus.document(index)) > prompt_len]
    for index in long_enough[:prompts]:
        text = corpus.document(index)[:prompt_len]
        text += greedy_reply(model, text, reply_len)
        hidden_Td = model.main_states(main_tensors(pack([text])))
        for known in range(prompt_len, len(text) - depth + 1):
            chain = draft_greedily(tensors, model.config, model.mtp, text[:known], hidden_Td[: known - 1], depth)
            rounds += 1
            for position, draft in enumerate(chain):
                if draft != text[known + position]:
                    break
                accepted[position] += 1
    by_position = [hits / max(1, rounds) for hits in accepted]
    return {
        "fed": "self-fed",
        "rollout": model.mtp.rollout,
        "text": "the main model's own greedy replies",
        "rounds": rounds,
        "by_position": by_position,
        "e_r": 1 + sum(by_position),
    }


def greedy_reply(model: V3Model, prompt: list[int], reply_len: int) -> list[int]:
    """`reply_len` tokens of the main model, one whole pass each."""
    text = list(prompt)
    for _ in range(reply_len):
        state_Td = model.main_states(main_tensors(pack([text])))
        text.append(int(model.logits(state_Td[-1:]).argmax()))
    return text[len(prompt) :]

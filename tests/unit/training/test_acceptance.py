"""The offline walk over greedy text gives what playing the rounds one by one gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain_rollout import norm, plain_chain
from tiny_llama import SHAPE, random_document

from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.oracle import draft_greedily
from seqmtp_serve.speculation.prompt_lookup import GREEDY
from seqmtp_serve.training.acceptance import Acceptance, measure, proposals, total, walk
from seqmtp_serve.training.loss import Frozen
from seqmtp_serve.training.mtp_module import MtpModule
from seqmtp_serve.training.shards import Document

DEPTH = 3


def plain_proposals(module: MtpModule, doc: Document, frozen: Frozen, ids: torch.Tensor, start: int) -> list[int]:
    """One chain, each step fed the token the step before chose."""
    hidden, chosen = doc.hidden.float(), list(doc.tokens[1 : start + 2].tolist())
    for step in range(DEPTH):
        embed = frozen.embed_Vd[torch.tensor(chosen)]
        padded = torch.cat((embed, embed[-1:].expand(DEPTH, -1)))
        out = plain_chain(module, hidden, padded, start, step + 1)[step]
        logits = frozen.head_Vd @ norm(out, frozen.norm_d, SHAPE.rms_eps)
        chosen.append(int(ids[int(logits.argmax())]))
    return chosen[start + 1 :]


@pytest.mark.covers(54, 93, 95)
def test_proposals_are_self_fed_chains(module: MtpModule, frozen: Frozen) -> None:
    doc = random_document(14, 5, seed=3)
    ids = torch.tensor([9, 3, 40, 17, 22, 5, 31, 60], dtype=torch.int32)
    narrow = replace(frozen, head_Vd=frozen.head_Vd[ids.long()])
    found = proposals(module, doc, narrow, ids, depth=DEPTH)
    bases = range(doc.prompt_len - 1, len(doc.tokens) - 1)
    assert found.shape == (len(bases), DEPTH)
    with torch.no_grad():
        for row, base in enumerate(bases):
            assert found[row].tolist() == plain_proposals(module, doc, narrow, ids, base)


@pytest.mark.covers(60, 93)
def test_what_was_fitted_is_what_the_reference_serves(
    module: MtpModule, frozen: Frozen, tensors: dict[str, torch.Tensor]
) -> None:
    """The same weights under their released names, in the cacheless reference the engine is tested against."""
    ids = torch.tensor([9, 3, 40, 17, 22, 5, 31, 60], dtype=torch.int32)
    prefix = f"model.layers.{SHAPE.num_layers}."
    released = tensors | {prefix + name: value.detach() for name, value in module.state_dict().items()}
    released[f"{prefix}draft_token_ids"] = ids
    doc = random_document(12, 4, seed=6)
    found = proposals(module, doc, replace(frozen, head_Vd=frozen.head_Vd[ids.long()]), ids, depth=DEPTH)
    config = MtpConfig(draft_vocab_size=len(ids))
    for row, base in enumerate(range(doc.prompt_len - 1, len(doc.tokens) - 1)):
        known, rows = doc.tokens[: base + 2].tolist(), doc.hidden[: base + 1].float()
        assert found[row].tolist() == draft_greedily(released, SHAPE, config, known, rows, DEPTH)


@pytest.mark.covers(95, 96, 103)
def test_a_round_moves_by_what_it_accepts_plus_one() -> None:
    """Text 10..19; the proposals are right for 0, 1, 2 or 3 positions."""
    text = list(range(10, 20))

    def chain(base: int, good: int) -> list[int]:
        return [text[base + 2 + k] if k < good else 99 for k in range(DEPTH) if base + 2 + k < len(text)] + [99] * DEPTH

    goods = {1: 2, 4: 0, 5: 1}  # rounds at bases 1, 4, 5; the next would start at 7: too little text left
    chains = [chain(base, goods.get(base, 3))[:DEPTH] for base in range(1, 9)]
    result = walk(text, chains, first_base=1)
    assert result == Acceptance(num_rounds=3, accepted=(2, 1, 0))
    assert result.by_position == (2 / 3, 1 / 3, 0.0)
    assert result.expected_progress == pytest.approx(2.0)


def test_perfect_and_hopeless_drafts() -> None:
    text = list(range(30))
    perfect = walk(text, [[b + 2, b + 3, b + 4] for b in range(4, 29)], first_base=4)
    assert perfect.by_position == (1.0, 1.0, 1.0)
    assert perfect.expected_progress == 4.0
    hopeless = walk(text, [[99, b + 3, b + 4] for b in range(4, 29)], first_base=4)
    assert hopeless.by_position == (0.0, 0.0, 0.0)
    assert hopeless.num_rounds > 3 * perfect.num_rounds


def test_a_walk_with_copies_takes_them_where_a_proposer_would() -> None:
    """The text says the same eight tokens four times; the module is always wrong."""
    text = list(range(10, 18)) * 4
    chains = [[99] * DEPTH] * len(text)
    assert walk(text, chains, first_base=6).accepted == (0, 0, 0)
    result = walk(text, chains, first_base=6, first_rates=GREEDY)
    # tokens 8 and 9 come one a round, with no match of two before them; then each round copies three, and gains four
    assert result == Acceptance(num_rounds=2 + 5, accepted=(5, 5, 5))


def test_documents_add_up(module: MtpModule, frozen: Frozen) -> None:
    documents = [random_document(30, 5, seed=i) for i in range(3)] + [random_document(7, 6, seed=9)]
    ids = torch.arange(SHAPE.vocab_size, dtype=torch.int32)
    results = measure(module, documents, frozen, ids, depth=DEPTH)
    whole = total(results, DEPTH)
    assert whole.num_rounds == sum(result.num_rounds for result in results) > 0
    assert results[-1].num_rounds == 0

"""Acceptance of sampled drafts: the chances of one chain computed plainly, and what a server accepts on average."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain_rollout import norm, plain_chain
from tiny_llama import SHAPE, random_document

from seqmtp_serve.training.loss import Frozen
from seqmtp_serve.training.mtp_module import MtpModule
from seqmtp_serve.training.sampled_acceptance import NOT_ACCEPTED, Sampling, chances, drawn, measure_sampled
from seqmtp_serve.training.shards import Document

DEPTH = 3
IDS = torch.tensor([9, 3, 40, 17, 22, 5, 31, 60], dtype=torch.int32)
SAMPLING = Sampling(temperature=0.7, top_n=5)


def target_logits(rows_Nd: torch.Tensor) -> torch.Tensor:
    """Any function of a row will do."""
    return rows_Nd.float() @ torch.randn(
        SHAPE.hidden_size, SHAPE.vocab_size, generator=torch.Generator().manual_seed(1)
    )


def plain_q(module: MtpModule, doc: Document, narrow: Frozen, base: int, step: int) -> dict[int, float]:
    """What proposal `step` of a chain from `base` is drawn from, the text's own tokens before it."""
    tokens = doc.tokens[1 : base + 2 + step]
    embed = narrow.embed_Vd[tokens]
    padded = torch.cat((embed, embed[-1:].expand(DEPTH, -1)))
    out = plain_chain(module, doc.hidden.float(), padded, base, step + 1)[step]
    logits = narrow.head_Vd @ norm(out, narrow.norm_d, SHAPE.rms_eps) / SAMPLING.temperature
    top, column = logits.topk(SAMPLING.top_n)
    return dict(zip(IDS[column].tolist(), top.softmax(-1).tolist(), strict=True))


@pytest.mark.covers(54, 93)
def test_chances_are_those_of_single_chains(module: MtpModule, frozen: Frozen) -> None:
    doc = random_document(14, 5, seed=3)
    doc.tokens[7:] = IDS.long()[torch.arange(len(doc.tokens) - 7) % len(IDS)]  # tokens that can be drafted
    narrow = replace(frozen, head_Vd=frozen.head_Vd[IDS.long()])
    found = chances(module, doc, narrow, IDS, target_logits, SAMPLING, depth=DEPTH)
    first = doc.prompt_len - 1
    assert found.shape == (len(doc.tokens) - 1 - first, DEPTH)
    positive = 0
    with torch.no_grad():
        for base in range(first, len(doc.tokens) - 1):
            for step in range(DEPTH):
                place, chance = base + 2 + step, float(found[base - first, step])
                if place >= len(doc.tokens):
                    assert chance == 0.0
                    continue
                p = (target_logits(doc.hidden[place - 1][None])[0] / SAMPLING.temperature).softmax(-1)
                token = int(doc.tokens[place])
                expected = min(1.0, plain_q(module, doc, narrow, base, step).get(token, 0.0) / float(p[token]))
                assert chance == pytest.approx(expected, rel=1e-3, abs=1e-6)
                positive += chance > 0
    assert positive > 5


def test_over_all_texts_a_first_proposal_is_accepted_as_often_as_the_distributions_overlap(
    module: MtpModule, frozen: Frozen
) -> None:
    """Every token that may come next, weighted by p: the sum of min(p, q)."""
    doc = random_document(14, 5, seed=4)
    narrow = replace(frozen, head_Vd=frozen.head_Vd[IDS.long()])
    base = doc.prompt_len + 2
    p = (target_logits(doc.hidden[base + 1][None])[0] / SAMPLING.temperature).softmax(-1)
    mean = 0.0
    for token in range(SHAPE.vocab_size):
        tokens = doc.tokens.clone()
        tokens[base + 2] = token
        found = chances(module, replace(doc, tokens=tokens), narrow, IDS, target_logits, SAMPLING, depth=1)
        mean += float(p[token] * found[base - doc.prompt_len + 1, 0])
    with torch.no_grad():
        q = plain_q(module, doc, narrow, base, 0)
    assert mean == pytest.approx(sum(min(float(p[token]), q[token]) for token in q), rel=1e-3)
    assert 0 < mean < 1


def test_draws_accept_what_is_sure_and_nothing_that_is_impossible() -> None:
    doc = random_document(12, 5, seed=1)
    sure = torch.ones(len(doc.tokens) - doc.prompt_len, 2)
    sure[:, 1] = 0.0
    chains = drawn(sure, doc, torch.Generator().manual_seed(0))
    first = doc.prompt_len - 1
    for row, chain in enumerate(chains[:-1]):
        assert chain == [int(doc.tokens[first + 2 + row]), NOT_ACCEPTED]


def test_documents_are_walked_alike_for_the_same_seed(module: MtpModule, frozen: Frozen) -> None:
    documents = [random_document(30, 5, seed=seed) for seed in range(3)] + [random_document(7, 6, seed=9)]
    ids = torch.arange(SHAPE.vocab_size, dtype=torch.int32)
    runs = [
        measure_sampled(
            module, documents, frozen, ids, target_logits, Sampling(temperature=1.0), depth=DEPTH, seed=seed
        )
        for seed in (5, 5, 6)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][-1].num_rounds == 0
    assert sum(result.num_rounds for result in runs[0]) > 0

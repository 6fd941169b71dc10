"""What a proposer draws: the declared distribution is the one drawn from, over any part of the vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from seqmtp_serve.ports import Draft
from seqmtp_serve.request import Contract, Ref, SamplingParams
from seqmtp_serve.speculation.choose import coupled_tokens
from seqmtp_serve.speculation.distributions import BadLogits
from seqmtp_serve.speculation.draft import propose_tokens
from seqmtp_serve.speculation.noise import Purpose, uniform
from seqmtp_serve.speculation.plain import plain_inverse_cdf
from seqmtp_serve.speculation.row_params import Ban, RowParams
from seqmtp_serve.speculation.sparse_q import check_draft
from tests.unit.devices import DEVICES, using

IDS = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19])
LOGITS = torch.randn(1, 8, generator=torch.Generator().manual_seed(6)) * 2


def propose(params, num=1, top_n=4, bans=None):
    rows = RowParams.stack([params] if isinstance(params, tuple) else [(params, 0)] * num, bans)
    return propose_tokens(LOGITS.expand(len(rows), 8), IDS, rows, [50] * len(rows), top_n)


@pytest.mark.covers(70)
def test_a_ratio_draft_declares_its_top_n_renormalised():
    proposals = propose(SamplingParams(temperature=0.8))
    probs = dict(proposals.pairs[0])
    weights = {token: math.exp(logit / 0.8) for token, logit in zip(IDS.tolist(), LOGITS[0].tolist(), strict=True)}
    best = sorted(weights, key=weights.__getitem__)[-4:]
    total = sum(weights[token] for token in best)
    assert probs == pytest.approx({token: weights[token] / total for token in best})
    draft = Draft(
        ref=Ref(request_id="r", epoch=1, version=1, digest=b""),
        tokens=tuple(proposals.tokens),
        draft_probs=tuple(proposals.pairs),
    )
    check_draft(draft, Contract.RATIO, vocab_size=20)


@pytest.mark.covers(70)
@pytest.mark.parametrize("seed", range(30))
def test_the_draft_is_drawn_from_the_pairs_it_sends(seed):
    proposals = propose((SamplingParams(seed=seed), 1))
    tokens, probs = zip(*proposals.pairs[0], strict=True)
    place = plain_inverse_cdf(probs, uniform(seed, 1, 50, Purpose.DRAFT))
    assert proposals.tokens[0] == tokens[place]


def test_filters_narrow_the_draft_too():
    assert len(propose(SamplingParams(top_k=2)).pairs[0]) == 2
    assert len(propose(SamplingParams(top_p=1e-6)).pairs[0]) == 1


def test_greedy_and_coupled_send_no_distribution():
    best = int(IDS[LOGITS[0].argmax()])
    assert propose(SamplingParams(temperature=0.0)).tokens == [best]
    for params in (SamplingParams(temperature=0.0), SamplingParams(seeded=True)):
        assert propose(params).pairs == [()]


@pytest.mark.parametrize("device", DEVICES)
def test_a_broken_row_is_named_by_its_place_in_the_batch(device):
    """Also where the rows of its contract are counted apart."""
    kinds = [SamplingParams(temperature=0.0), SamplingParams(seeded=True), SamplingParams(temperature=0.7)]
    with using(device) as place:
        rows = RowParams.stack([(kinds[row % 3], 0) for row in range(9)], device=place)
        logits = LOGITS.repeat(9, 1)
        for row in (4, 8):
            broken = logits.clone()
            broken[row, 3] = math.nan
            with pytest.raises(BadLogits) as caught:
                propose_tokens(broken.to(place), IDS.to(place), rows, [50] * 9, 4)
            assert caught.value.rows == (row,)


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_are_the_same_on_any_device(device):
    kinds = [SamplingParams(temperature=0.0), SamplingParams(seeded=True, seed=3), SamplingParams(top_k=3, seed=9)]
    rows = [(kinds[row % 3], row) for row in range(12)]
    expected = propose_tokens(LOGITS.repeat(12, 1), IDS, RowParams.stack(rows), [50] * 12, 4)
    with using(device) as place:
        params = RowParams.stack(rows, device=place)
        found = propose_tokens(LOGITS.repeat(12, 1).to(place), IDS.to(place), params, [50] * 12, 4)
    assert found.tokens == expected.tokens
    for own, other in zip(found.pairs, expected.pairs, strict=True):
        assert dict(own) == pytest.approx(dict(other))


@pytest.mark.covers(71)
def test_coupled_drafts_use_the_targets_noise():
    """With the target's own logits over its whole vocabulary, each draft is the token the target will choose."""
    rows = RowParams.stack([(SamplingParams(seeded=True, seed=seed), 0) for seed in range(200)])
    full = torch.full((200, 20), -math.inf)
    full[:, IDS] = LOGITS
    chosen = coupled_tokens(full, rows, torch.full((200,), 50))
    drafts = propose_tokens(LOGITS.expand(200, 8), IDS, rows, [50] * 200, 4)
    assert drafts.tokens == chosen.tolist()
    assert len(set(drafts.tokens)) > 3


def test_a_banned_token_is_not_drafted():
    best = int(IDS[LOGITS[0].argmax()])
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(seeded=True)):
        bans = [Ban(token_ids=(best,), before=51)]
        proposals = propose(params, bans=bans)
        assert proposals.tokens != [best]
        assert best not in dict(proposals.pairs[0])

"""Batched selection against the plain chain, and what a batch must not change."""

from __future__ import annotations

import math
import random

import pytest
import torch

from seqmtp_serve.errors import InternalError, ProtocolError
from seqmtp_serve.ports import Draft
from seqmtp_serve.request import Contract, Ref, Request, SamplingParams
from seqmtp_serve.speculation.chain import select_chain
from seqmtp_serve.speculation.distributions import BadLogits
from seqmtp_serve.speculation.plain import plain_chain
from seqmtp_serve.speculation.row_params import Ban, RowParams
from seqmtp_serve.speculation.sparse_q import SparseQ, check_draft
from tests.unit.devices import DEVICES, using

DEPTH = 3


def random_case(draws, vocab_size, contract):
    """One request: logits [R][V], drafts, their distributions, parameters, choice, position."""
    logits = [[draws.gauss(0.0, 1.5) for _ in range(vocab_size)] for _ in range(DEPTH + 1)]
    pairs = []
    for _ in range(draws.randint(0, DEPTH)):
        support = draws.sample(range(vocab_size), draws.randint(1, vocab_size))
        weights = [draws.random() + 0.01 for _ in support]
        pairs.append(tuple((token, w / sum(weights)) for token, w in zip(support, weights, strict=True)))
    drafts = [draws.choices([t for t, _ in each], [p for _, p in each])[0] for each in pairs]
    if draws.random() < 0.5:  # a draft that is often right
        drafts = [max(range(vocab_size), key=row.__getitem__) for row in logits[: len(pairs)]]
        pairs = [((draft, 1.0),) for draft in drafts]
    params = SamplingParams(
        temperature=0.0 if contract is Contract.GREEDY else draws.choice([0.3, 1.0, 1.5]),
        seeded=contract is Contract.COUPLED,
        seed=draws.getrandbits(64),
        top_k=draws.choice([0, 2, 3]),
        top_p=draws.choice([1.0, 0.8]),
        min_p=draws.choice([0.0, 0.1]),
    )
    return logits, drafts, pairs, params, draws.randint(0, 2), draws.randint(1, 5000)


def select_cases(cases, device="cpu"):
    logits, drafts, pairs, params, choices, positions = zip(*cases, strict=True)
    padded = [each + [0] * (DEPTH - len(each)) for each in drafts]
    return select_chain(
        torch.tensor(logits, dtype=torch.float64, device=device),
        torch.tensor(padded).reshape(len(cases), DEPTH),
        [len(each) for each in drafts],
        SparseQ.stack(pairs, DEPTH, device),
        RowParams.stack(list(zip(params, choices, strict=True)), device=device),
        positions,
    )


@pytest.mark.covers(67, 68, 69, 72, 96)
@pytest.mark.parametrize("contracts", [*[[each] for each in Contract], list(Contract)])
@pytest.mark.parametrize("vocab_size", [2, 4, 9])
def test_the_batched_chain_is_the_plain_chain(vocab_size, contracts):
    draws = random.Random(f"{vocab_size} {contracts}")
    cases = [random_case(draws, vocab_size, draws.choice(contracts)) for _ in range(300)]
    selection = select_cases(cases)
    expected = [
        plain_chain(logits, drafts, [dict(each) for each in pairs], params, choice, position)
        for logits, drafts, pairs, params, choice, position in cases
    ]
    assert selection.tokens == expected
    assert selection.accepted == [len(each) - 1 for each in expected]
    assert {len(each) for each in expected} == {1, 2, 3, 4}  # every outcome occurred


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("contracts", [*[[each] for each in Contract], list(Contract)])
def test_all_rows_chosen_at_once_are_those_chosen_one_after_the_other(device, contracts):
    """Off the CPU rows behind a rejection are chosen, too, and must not matter, broken ones neither."""
    draws = random.Random(f"{contracts}")
    cases = [random_case(draws, 9, draws.choice(contracts)) for _ in range(200)]
    for logits, drafts, *_ in cases[::3]:
        for row in range(len(drafts) + 1, DEPTH + 1):
            logits[row][0] = math.nan  # never read
    expected = select_cases(cases)
    rejected = [b for b, (_, drafts, *_) in enumerate(cases) if expected.accepted[b] < len(drafts) - 1]
    for b in rejected[::2]:
        cases[b][0][len(cases[b][1])] = [math.inf] * 9  # the bonus row of a chain that ends earlier
    with using(device) as place:
        assert select_cases(cases, place) == select_cases(cases) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_what_cannot_be_chosen_is_told_by_request_on_any_device(device):
    draws = random.Random(0)
    cases = [random_case(draws, 6, Contract.RATIO) for _ in range(6)]
    cases[2][0][0] = [-math.inf] * 6
    cases[4][0][0] = [math.nan] * 6
    with using(device) as place, pytest.raises(BadLogits) as caught:
        select_cases(cases, place)
    assert caught.value.rows == (2, 4)
    logits, drafts, pairs, *rest = next(case for case in cases[:2] if case[1])
    pairs[0] = (((drafts[0] + 1) % 6, 1.0),)
    with using(device) as place, pytest.raises(ProtocolError, match="probability 0"):
        select_cases([(logits, drafts, pairs, *rest)], place)


@pytest.mark.covers(71, 138)
def test_a_request_does_not_notice_its_neighbours():
    """Bit for bit at a vocabulary of thousands: alone, among 15 others, in another order."""
    draws = torch.Generator().manual_seed(3)
    logits = torch.randn(16, 3, 5000, generator=draws) * 3
    drafts = logits[:, :2].argmax(-1)
    params = [
        SamplingParams(temperature=t, seeded=seeded, seed=row, top_p=top_p)
        for row, (t, seeded, top_p) in enumerate(
            [(0.0, False, 1.0), (0.8, True, 0.9), (0.8, False, 0.9), (1.2, False, 1.0)] * 4
        )
    ]
    pairs = [[((int(token), 1.0),) for token in row] for row in drafts]

    def run(rows):
        return select_chain(
            logits[rows],
            drafts[rows],
            [2] * len(rows),
            SparseQ.stack([pairs[row] for row in rows], 2),
            RowParams.stack([(params[row], 0) for row in rows]),
            [100 + row for row in rows],
        ).tokens

    together = run(list(range(16)))
    assert [run([row])[0] for row in range(16)] == together
    assert run(list(range(15, -1, -1)))[::-1] == together


@pytest.mark.covers(72)
def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.zeros(1, 2, 600)
    logits[0, 0, [17, 400]] = 2.0
    logits[0, 1, [599, 300]] = 2.0
    selection = select_chain(
        logits, torch.tensor([[17]]), [1], None, RowParams.stack([(SamplingParams(temperature=0.0), 0)]), [5]
    )
    assert selection.tokens == [[17, 300]]


@pytest.mark.covers(71)
def test_a_coupled_text_does_not_depend_on_its_drafts():
    draws = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 2, 8, generator=draws).expand(8, 2, 8)
    params = RowParams.stack([(SamplingParams(seeded=True, seed=9), 0)] * 8)
    selection = select_chain(logits, torch.arange(8)[:, None], [1] * 8, None, params, [5] * 8)
    firsts = {tokens[0] for tokens in selection.tokens}
    assert len(firsts) == 1
    assert selection.accepted == [int(draft in firsts) for draft in range(8)]


@pytest.mark.covers(71, 138)
def test_seed_choice_and_position_each_change_the_draw():
    logits = torch.zeros(64, 1, 1000)

    def tokens(seeds, choices, positions):
        rows = [(SamplingParams(seeded=True, seed=seed), choice) for seed, choice in zip(seeds, choices, strict=True)]
        none = torch.zeros(64, 0, dtype=torch.int64)
        selection = select_chain(logits, none, [0] * 64, None, RowParams.stack(rows), positions)
        return [each[0] for each in selection.tokens]

    same, all_different = [7] * 64, list(range(64))
    assert len(set(tokens(same, same, same))) == 1
    for arguments in ((all_different, same, same), (same, all_different, same), (same, same, all_different)):
        assert len(set(tokens(*arguments))) > 50


@pytest.mark.covers(67)
def test_a_rejection_without_residual_mass_is_an_acceptance_and_counted():
    """Rounding, exaggerated: q is above p = (0.5, 0.5) at the draft and nowhere below, so nothing is left to draw."""
    q = SparseQ.stack([[((0, 0.75), (1, 0.5))]] * 400, 1)
    params = RowParams.stack([(SamplingParams(seed=seed), 0) for seed in range(400)])
    drafts = torch.zeros(400, 1, dtype=torch.int64)
    selection = select_chain(torch.zeros(400, 2, 2), drafts, [1] * 400, q, params, [1] * 400)
    assert all(tokens[0] == 0 and len(tokens) == 2 for tokens in selection.tokens)
    assert 90 < selection.num_clamped < 180  # a third of the draws lie above p / q


@pytest.mark.covers(67)
@pytest.mark.parametrize("seed", range(20))
def test_a_draft_the_target_excludes_is_never_accepted(seed):
    logits = torch.tensor([[[-math.inf, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    q = SparseQ.stack([[((0, 1.0),)]], 1)
    params = RowParams.stack([(SamplingParams(seed=seed), 0)])
    selection = select_chain(logits, torch.tensor([[0]]), [1], q, params, [3])
    assert selection.accepted == [0]
    assert selection.tokens[0][0] in (1, 2)


@pytest.mark.parametrize("contract", Contract)
def test_broken_logits_name_their_request_and_spoil_no_other(contract):
    params = SamplingParams(
        temperature=0.0 if contract is Contract.GREEDY else 1.0, seeded=contract is Contract.COUPLED
    )
    logits = torch.zeros(4, 2, 6)
    logits[2, 0, 3] = math.nan
    drafts, q = torch.zeros(4, 1, dtype=torch.int64), SparseQ.stack([[((0, 1.0),)]] * 4, 1)
    stacked = RowParams.stack([(params, 0)] * 4)
    with pytest.raises(BadLogits) as caught:
        select_chain(logits, drafts, [1] * 4, q, stacked, [1] * 4)
    assert isinstance(caught.value, InternalError)
    assert caught.value.rows == (2,)
    rest = [0, 1, 3]
    q_rest = SparseQ(tokens_BKn=q.tokens_BKn[rest], probs_BKn=q.probs_BKn[rest])
    assert len(select_chain(logits[rest], drafts[rest], [1] * 3, q_rest, stacked.take(rest), [1] * 3).tokens) == 3


@pytest.mark.covers(81)
def test_min_tokens_counts_the_drafts_accepted_before():
    """EOS is the likeliest token of every row; the third output token is the first that may be EOS."""
    eos, plain = 2, 1
    logits = torch.tensor([[0.0, 5.0, 9.0]]).expand(1, 4, 3)
    request = Request(
        request_id="r",
        prompt_ids=(0,) * 10,
        params=SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(99,)),
        eos_token_ids=(eos,),
    )
    params = RowParams.of_requests([request])
    assert params.bans == (Ban(token_ids=(99, eos), before=12),)
    drafts = torch.tensor([[plain, plain, eos]])
    assert select_chain(logits, drafts, [3], None, params, [10]).tokens == [[plain, plain, eos, eos]]
    assert select_chain(logits, drafts, [3], None, params, [11]).tokens == [[plain, eos]]


def draft_of(tokens, probs=()):
    ref = Ref(request_id="r", epoch=1, version=1, digest=b"")
    return Draft(ref=ref, tokens=tokens, draft_probs=probs)


@pytest.mark.covers(70)
@pytest.mark.parametrize(
    ("tokens", "probs", "contract"),
    [
        ((-1,), (), Contract.GREEDY),
        ((3, 10), (), Contract.COUPLED),
        ((1,), (), Contract.RATIO),
        ((1,), (((2, 1.0),),), Contract.RATIO),
        ((1,), (((1, 0.0), (2, 1.0)),), Contract.RATIO),
        ((1,), (((1, 0.5), (2, 0.4)),), Contract.RATIO),
        ((1,), (((1, 0.5), (1, 0.5)),), Contract.RATIO),
        ((1,), (((1, 0.5), (10, 0.5)),), Contract.RATIO),
        ((1,), (((1, math.nan),),), Contract.RATIO),
        ((1,), (((1, 1.5), (2, -0.5)),), Contract.RATIO),
    ],
)
def test_drafts_that_no_honest_proposer_sends_are_refused(tokens, probs, contract):
    with pytest.raises(ProtocolError):
        check_draft(draft_of(tokens, probs), contract, vocab_size=10)


def test_honest_drafts_pass():
    check_draft(draft_of((1, 9)), Contract.GREEDY, 10)
    check_draft(draft_of((1,), (((1, 0.25), (2, 0.75)),)), Contract.RATIO, 10)
    check_draft(draft_of(()), Contract.RATIO, 10)


@pytest.mark.covers(70)
@pytest.mark.parametrize("token", [-1, 6])
def test_selection_itself_refuses_a_token_outside_the_vocabulary(token):
    params = RowParams.stack([(SamplingParams(temperature=0.0), 0)])
    with pytest.raises(ProtocolError):
        select_chain(torch.zeros(1, 2, 6), torch.tensor([[token]]), [1], None, params, [1])


@pytest.mark.covers(70)
def test_selection_itself_refuses_a_draft_outside_its_distribution():
    params = RowParams.stack([(SamplingParams(), 0)])
    for q in (None, SparseQ.stack([[((3, 1.0),)]], 1)):
        with pytest.raises(ProtocolError):
            select_chain(torch.zeros(1, 2, 6), torch.tensor([[2]]), [1], q, params, [1])

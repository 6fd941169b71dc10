"""The joint distribution of three generated tokens, by chi-square; and that wrong selectors fail the same test.

A toy language of four tokens: the target's and the draft's logits depend on the last token, so an error at one token
spreads to the next ones. Requests differ in their seed only.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2

from seqmtp_serve.request import Contract, SamplingParams
from seqmtp_serve.speculation import choose
from seqmtp_serve.speculation.chain import Selection, select_chain
from seqmtp_serve.speculation.distributions import inverse_cdf, target_probs
from seqmtp_serve.speculation.draft import Proposals, propose_tokens
from seqmtp_serve.speculation.draft_chances import confidences
from seqmtp_serve.speculation.noise import Purpose, stream_keys, uniforms
from seqmtp_serve.speculation.plain import plain_probs
from seqmtp_serve.speculation.row_params import RowParams
from seqmtp_serve.speculation.sparse_q import SparseQ

VOCAB, NUM_TOKENS, TOP_N = 4, 3, 3
FIRST_POSITION = 11
TABLES = torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(20))
TARGET, DRAFT = TABLES[0] * 1.2, TABLES[0] * 0.6 + TABLES[1] * 0.8  # logits by last token
IDS = torch.arange(VOCAB)


def generate(params, depth, num, select=select_chain, propose=propose_tokens, is_worth=None):
    """`num` texts of NUM_TOKENS tokens, by rounds of at most `depth` drafts; and the share of drafts accepted.

    A chain ends before the first draft that `is_worth` (logits, drafts) -> list of bool leaves out.
    """
    texts = [[] for _ in range(num)]
    rows = RowParams.stack([(replace(params, seed=seed), 0) for seed in range(num)])
    drafted = accepted = 0
    alive = list(range(num))
    while alive:
        stacked = rows.take(alive)
        last = torch.tensor([texts[b][-1] if texts[b] else 0 for b in alive])
        positions = [FIRST_POSITION + len(texts[b]) for b in alive]
        inputs, pairs, lengths = [last], [[] for _ in alive], [depth] * len(alive)
        for step in range(depth):
            logits_BV = DRAFT[inputs[-1]]
            proposals = propose(logits_BV, IDS, stacked, [each + step for each in positions], TOP_N)
            if is_worth is not None:
                worth = is_worth(logits_BV, proposals.tokens)
                lengths = [one if each else min(one, step) for one, each in zip(lengths, worth, strict=True)]
            inputs.append(torch.tensor(proposals.tokens))
            for chain, each in zip(pairs, proposals.pairs, strict=True):
                chain.append(each)
        logits_BRV = TARGET[torch.stack(inputs, 1)]
        drafts_BK = torch.stack([*inputs[1:]], 1) if depth else torch.zeros(len(alive), 0, dtype=torch.int64)
        q = SparseQ.stack(pairs, depth) if params.contract is Contract.RATIO else None
        selection = select(logits_BRV, drafts_BK, lengths, q, stacked, positions)
        for b, tokens in zip(alive, selection.tokens, strict=True):
            texts[b] += tokens
        drafted += sum(lengths)
        accepted += sum(selection.accepted)
        alive = [b for b in alive if len(texts[b]) < NUM_TOKENS]
    return [tuple(text[:NUM_TOKENS]) for text in texts], accepted / max(drafted, 1)


def excess_chi_square(texts, params):
    """The chi-square statistic over its critical value at one in a million: above 1 the texts are not the target's."""
    rows = [plain_probs(row, params) for row in TARGET.to(torch.float64).tolist()]
    expected = {}
    for text in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        prob = 1.0
        for last, token in zip((0, *text), text, strict=False):
            prob *= rows[last][token]
        expected[text] = prob * len(texts)
    counts = dict.fromkeys(expected, 0)
    for text in texts:
        counts[text] += 1
    assert all(expected[text] > 0.0 for text, count in counts.items() if count)
    cells = [text for text, value in expected.items() if value >= 8.0]
    observed = [counts[text] for text in cells] + [len(texts) - sum(counts[text] for text in cells)]
    wanted = [expected[text] for text in cells] + [len(texts) - sum(expected[text] for text in cells)]
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True) if w > 1.0)
    return statistic / chi2.ppf(1.0 - 1e-6, len(cells))


@pytest.mark.covers(70, 71, 96, 151)
@pytest.mark.parametrize("contract", [Contract.RATIO, Contract.COUPLED])
@pytest.mark.parametrize(
    ("temperature", "depth", "filters"),
    [
        (0.7, 0, {}),
        (0.7, 1, {}),
        (0.7, 3, {}),
        (1.0, 1, {"top_k": 2}),
        (1.0, 2, {}),
        (1.0, 3, {"top_p": 0.8}),
        (1.5, 1, {"top_k": 3, "top_p": 0.9, "min_p": 0.2}),
        (1.5, 3, {}),
    ],
)
def test_speculation_leaves_the_joint_distribution_alone(contract, temperature, depth, filters):
    params = SamplingParams(temperature=temperature, seeded=contract is Contract.COUPLED, **filters)
    texts, acceptance = generate(params, depth, 10_000)
    assert excess_chi_square(texts, params) < 1.0
    assert depth == 0 or 0.2 < acceptance < 0.95  # both branches were taken


def by_confidence(logits_BV, tokens):
    """As a target does: whichever token was drawn."""
    return [confidence > 0.38 for confidence in confidences(logits_BV)]


def by_its_own_probability(logits_BV, tokens):
    """Wrong under the ratio contract: what is left out was not drawn from the q that the rest is judged by."""
    return [row[token] > 0.3 for row, token in zip(logits_BV.softmax(-1).tolist(), tokens, strict=True)]


@pytest.mark.covers(70, 71)
@pytest.mark.parametrize("contract", [Contract.RATIO, Contract.COUPLED])
@pytest.mark.parametrize("depth", [1, 3])
def test_leaving_drafts_out_by_how_sure_the_module_is_leaves_the_distribution_alone(contract, depth):
    params = SamplingParams(temperature=1.0, seeded=contract is Contract.COUPLED)
    texts, _ = generate(params, depth, 10_000, is_worth=by_confidence)
    assert excess_chi_square(texts, params) < 1.0
    shares = confidences(DRAFT)
    assert min(shares) < 0.38 < max(shares), "some drafts were left out and some were not"


@pytest.mark.covers(70)
@pytest.mark.parametrize("depth", [1, 3])
def test_leaving_drafts_out_by_their_own_probability_fails(depth):
    params = SamplingParams(temperature=1.0)
    texts, _ = generate(params, depth, 10_000, is_worth=by_its_own_probability)
    assert excess_chi_square(texts, params) > 1.5


@pytest.mark.covers(71)
def test_a_coupled_text_is_the_same_at_every_depth():
    params = SamplingParams(seeded=True, temperature=0.8)
    texts = {depth: generate(params, depth, 500)[0] for depth in range(4)}
    assert texts[0] == texts[1] == texts[2] == texts[3]


@pytest.mark.covers(72)
def test_a_greedy_text_is_the_same_at_every_depth():
    params = SamplingParams(temperature=0.0)
    texts = {depth: generate(params, depth, 1)[0] for depth in range(4)}
    assert texts[0] == texts[1] == texts[2] == texts[3]


@pytest.mark.covers(71, 138)
def test_one_token_over_many_trials():
    """The case that caught one shared noise stream elsewhere: p = (0.1, 0.6, 0.3) over 131,072 trials."""
    num, p, q = 131_072, (0.1, 0.6, 0.3), (0.5, 0.3, 0.2)
    params = RowParams.stack([(SamplingParams(seed=seed), 0) for seed in range(num)])
    drafts = propose_tokens(torch.tensor([q]).log().expand(num, 3), torch.arange(3), params, [7] * num, 3)
    selection = select_chain(
        torch.tensor([p]).log().expand(num, 2, 3),
        torch.tensor(drafts.tokens)[:, None],
        [1] * num,
        SparseQ.stack([[pairs] for pairs in drafts.pairs], 1),
        params,
        [7] * num,
    )
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in selection.tokens]), minlength=3).tolist()
    statistic = sum((count - num * each) ** 2 / (num * each) for count, each in zip(counts, p, strict=True))
    assert statistic < chi2.ppf(1.0 - 1e-6, 2)
    assert sum(selection.accepted) / num == pytest.approx(0.6, abs=0.01)  # sum of min(p, q)


# ---- wrong selectors: each must fail the test above --------------------------------------------------------------


def corrects_from_p(logits_NV, params, position_N, draft_N, q_tokens_Nn, q_probs_Nn):
    """The correction is a fresh sample of p."""
    prob_NV = target_probs(logits_NV, params)
    draft_N1 = draft_N.clamp_min(0)[:, None]
    q_draft_N = q_probs_Nn.masked_fill(q_tokens_Nn != draft_N1, 0.0).sum(-1)
    u_N = uniforms(params.keys(position_N, Purpose.ACCEPT))
    accept_N = (draft_N >= 0) & (u_N < prob_NV.gather(-1, draft_N1)[:, 0] / q_draft_N)
    fresh_N = inverse_cdf(prob_NV, uniforms(params.keys(position_N, Purpose.RESAMPLE)))
    return torch.where(accept_N, draft_N, fresh_N), 0


def adds_a_bonus_after_a_rejection(logits_BRV, draft_ids_BK, draft_len_B, q, params, positions_B):
    """One more token from the row after the rejected draft, whose context is wrong."""
    selection = select_chain(logits_BRV, draft_ids_BK, draft_len_B, q, params, positions_B)
    num_rows = logits_BRV.shape[1]
    next_row = torch.tensor([min(len(tokens), num_rows - 1) for tokens in selection.tokens])
    none = torch.zeros(len(params), 0, dtype=torch.int64)
    extra = select_chain(
        logits_BRV[torch.arange(len(params)), next_row][:, None],
        none,
        [0] * len(params),
        None,
        params,
        [position + len(tokens) for position, tokens in zip(positions_B, selection.tokens, strict=True)],
    )
    tokens = [
        own + more if len(own) < num_rows else own for own, more in zip(selection.tokens, extra.tokens, strict=True)
    ]
    return Selection(tokens=tokens, accepted=selection.accepted)


def sends_another_temperatures_q(logits_BV, draft_token_ids_V, params, positions_B, top_n):
    """Drafts are drawn at twice the temperature that the sent distribution has."""
    hot = replace(params, temperature_N=params.temperature_N * 2.0)
    drawn = propose_tokens(logits_BV, draft_token_ids_V, hot, positions_B, top_n)
    sent = propose_tokens(logits_BV, draft_token_ids_V, params, positions_B, top_n)
    return Proposals(tokens=drawn.tokens, pairs=sent.pairs)


def keys_shared_by(*purposes):
    """Stream keys under which these purposes have one stream."""

    def keys(self, position_N, purpose):
        purpose = purposes[0] if purpose in purposes else purpose
        return stream_keys(self.seed_N, self.choice_N, position_N, purpose)

    return keys


def keys_without_position(self, position_N, purpose):
    """The same draws again at every token."""
    return stream_keys(self.seed_N, self.choice_N, torch.zeros_like(position_N), purpose)


@pytest.mark.covers(69, 70, 71, 127, 128, 129, 138)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("fault", "arguments", "patches"),
    [
        ("correction from p", {}, [(choose, "ratio_tokens", corrects_from_p)]),
        ("bonus after a rejection", {"select": adds_a_bonus_after_a_rejection}, []),
        ("q of another temperature", {"propose": sends_another_temperatures_q}, []),
        (
            "one stream for everything",
            {},
            [(RowParams, "keys", keys_shared_by(Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESAMPLE))],
        ),
        ("accept reuses the draft's u", {}, [(RowParams, "keys", keys_shared_by(Purpose.DRAFT, Purpose.ACCEPT))]),
        (
            "correction reuses the test's u",
            {},
            [(RowParams, "keys", keys_shared_by(Purpose.ACCEPT, Purpose.RESAMPLE))],
        ),
        ("draws without position", {}, [(RowParams, "keys", keys_without_position)]),
    ],
)
def test_a_wrong_selector_fails(monkeypatch, depth, fault, arguments, patches):
    for target, name, wrong in patches:
        monkeypatch.setattr(target, name, wrong)
    params = SamplingParams(temperature=1.0)
    texts, _ = generate(params, depth, 10_000, **arguments)
    assert excess_chi_square(texts, params) > 1.5, fault


@pytest.mark.covers(71)
def test_coupled_noise_under_the_ratio_rule_fails():
    """A draft that used the position's shared Gumbel noise must be judged by equality, never by the ratio."""
    params = SamplingParams(temperature=1.0)

    def propose_coupled(logits_BV, draft_token_ids_V, rows, positions_B, top_n):
        coupled = replace(rows, contracts=(Contract.COUPLED,) * len(rows))
        tokens = propose_tokens(logits_BV, draft_token_ids_V, coupled, positions_B, top_n).tokens
        probs = target_probs(logits_BV, rows).tolist()
        return Proposals(tokens=tokens, pairs=[tuple(enumerate(row)) for row in probs])

    def shared_keys(self, position_N, purpose):
        return stream_keys(self.seed_N, self.choice_N, position_N, Purpose.TOKEN)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowParams, "keys", shared_keys)
        texts, _ = generate(params, 1, 10_000, propose=propose_coupled)
    assert excess_chi_square(texts, params) > 1.5

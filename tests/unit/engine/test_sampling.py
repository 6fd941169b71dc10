"""Sampled text through both engines: distributed as the target alone, and blind to its neighbours."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from driver import Driver
from engines import config, proposer, request, seeded, target
from scipy.stats import chisquare

from seqmtp_serve import oracle
from seqmtp_serve.engine.direct import DirectProposer
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.engine.target import TargetEngine
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY, mtp_tensors, target_tensors
from seqmtp_serve.request import Request, SamplingParams
from seqmtp_serve.speculation.distributions import target_probs
from seqmtp_serve.speculation.row_params import RowParams

NUM_REQUESTS = 1500
SMALL = replace(TINY, vocab_size=5)
TARGET = target_tensors(SMALL, seed=4, context=1.0)
MTP = mtp_tensors(TARGET, SMALL, seed=5) | {
    f"model.layers.{SMALL.num_layers}.eh_proj.weight": torch.randn(
        SMALL.hidden_size, 2 * SMALL.hidden_size, generator=torch.Generator().manual_seed(6)
    )  # knows nothing: about half its drafts fail
}
PROMPT = (1, 4, 0, 2)


def params(seed: int, *, is_seeded: bool) -> SamplingParams:
    return SamplingParams(temperature=10.0, top_k=4, seed=seed, seeded=is_seeded, max_tokens=4)


def exact_joint() -> dict[tuple[int, ...], float]:
    """Probability of each beginning of three tokens, from the reference's logits."""
    rows = RowParams.stack([(params(0, is_seeded=False), 0)])
    joint = {}
    for tokens in product(range(SMALL.vocab_size), repeat=3):
        logits, _ = oracle.forward(TARGET, SMALL, [*PROMPT, *tokens])
        probability = 1.0
        for index, token in enumerate(tokens):
            position = len(PROMPT) - 1 + index
            probability *= float(target_probs(logits[position : position + 1], rows)[0, token])
        joint[tokens] = probability
    return joint


@pytest.mark.covers(68, 69, 71)
@pytest.mark.parametrize("is_seeded", [False, True], ids=["ratio", "coupled"])
def test_the_joint_distribution_is_the_targets(is_seeded: bool) -> None:
    """chi-square over the first three tokens of four; drafts are accepted sometimes and rejected sometimes."""
    link = DirectProposer(ProposerEngine(config(num_pages=400), SMALL, MtpConfig(), MTP))
    engine = TargetEngine(config(num_pages=400, max_batch=250), SMALL, TARGET, link)
    counts, accepted, drafted = Counter[tuple[int, ...]](), 0, 0
    for start in range(0, NUM_REQUESTS, 250):
        requests = [
            Request(request_id=f"s{seed}", prompt_ids=PROMPT, params=params(seed, is_seeded=is_seeded))
            for seed in range(start, start + 250)
        ]
        for stream in Driver(engine, depth=2).run(*requests):
            counts[tuple(stream.output[:3])] += 1
            accepted += sum(row.accepted for row in stream.rows)
            drafted += sum(row.drafted for row in stream.rows)
    assert drafted > NUM_REQUESTS
    assert 0.2 < accepted / drafted < 0.85
    joint = exact_joint()
    assert all(joint[tokens] > 0 for tokens in counts), "a token outside top-k came out"
    common = [tokens for tokens, probability in joint.items() if probability * NUM_REQUESTS >= 5]
    rest = 1.0 - sum(joint[tokens] for tokens in common)
    observed = [counts[tokens] for tokens in common]
    expected = [joint[tokens] * NUM_REQUESTS for tokens in common]
    if rest * NUM_REQUESTS >= 5:
        observed.append(NUM_REQUESTS - sum(observed))
        expected.append(rest * NUM_REQUESTS)
    else:
        expected = [value * sum(observed) / sum(expected) for value in expected]
    assert len(observed) > 20
    assert chisquare(observed, expected).pvalue > 1e-4


@pytest.mark.covers(72)
def test_contracts_mix_in_a_batch_and_do_not_touch_each_other() -> None:
    requests = [
        request(0),
        seeded(1, temperature=0.7),
        replace(request(2, temperature=0.9, seed=5), request_id="ratio"),
        seeded(3, temperature=1.2, top_k=5),
        request(4, temperature=0.0, min_tokens=10),
        seeded(5, min_p=0.1, min_tokens=5),
    ]
    link = proposer()
    together = {stream.ref.request_id: stream.output for stream in Driver(target(link)).run(*requests)}
    for each in requests:
        if each.request_id == "ratio":
            assert 1 <= len(together["ratio"]) <= each.params.max_tokens
        else:
            assert together[each.request_id] == Driver(target(None), depth=0).run(each)[0].output
    assert not link.refusals


@pytest.mark.covers(70)
def test_a_ratio_request_repeats_itself_beside_any_neighbour() -> None:
    """Its draws are keyed by seed and position, and the drafts' distributions by the text: nothing else enters."""
    each = request(1, temperature=0.9, seed=11, max_tokens=30)
    alone = Driver(target(proposer())).run(each)[0].output
    beside = Driver(target(proposer())).run(request(0), each, seeded(2))[1].output
    assert beside == alone
    assert torch.tensor(alone).unique().numel() > 3

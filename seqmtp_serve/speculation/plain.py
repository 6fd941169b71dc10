"""The whole of speculation in plain Python, one request at a time: the oracle for the batched forms.

Slow and obvious on purpose. It shares only the scalar draws of `noise.py` with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, inf

from seqmtp_serve.request import Contract, SamplingParams
from seqmtp_serve.speculation.noise import Purpose, gumbel_one, stream_key, uniform


def plain_probs(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """`distributions.target_probs` of one row at a temperature above 0."""
    top = max(logits)
    weights = [exp((logit - top) / params.temperature) for logit in logits]
    ranked = sorted(weights, reverse=True)[: params.top_k or None]
    nucleus, mass = [], 0.0
    for weight in ranked:
        if params.top_p < 1.0 and mass >= params.top_p * sum(ranked):
            break
        nucleus.append(weight)
        mass += weight
    floor = max(nucleus[-1], params.min_p)  # the top weight is 1
    kept = [weight if weight >= floor else 0.0 for weight in weights]
    return [weight / sum(kept) for weight in kept]


def plain_inverse_cdf(weights: Sequence[float], u: float) -> int:
    """`distributions.inverse_cdf` of one row."""
    bound, cumulative = u * sum(weights), 0.0
    for token, weight in enumerate(weights):
        cumulative += weight
        if cumulative > bound and weight > 0.0:
            return token
    raise AssertionError("u must lie in [0, 1)")


def plain_chain(
    logits: Sequence[Sequence[float]],
    drafts: Sequence[int],
    draft_probs: Sequence[Mapping[int, float]],
    params: SamplingParams,
    choice: int,
    position: int,
) -> list[int]:
    """`chain.select_chain` of one request: accepted drafts and one more token."""
    tokens: list[int] = []
    for depth in range(len(drafts) + 1):
        draft = drafts[depth] if depth < len(drafts) else None
        q = draft_probs[depth] if draft is not None and params.contract is Contract.RATIO else {}
        tokens.append(_plain_token(logits[depth], draft, q, params, choice, position + depth))
        if tokens[-1] != draft:
            break
    return tokens


def _plain_token(
    logits: Sequence[float],
    draft: int | None,
    q: Mapping[int, float],
    params: SamplingParams,
    choice: int,
    position: int,
) -> int:
    if params.contract is Contract.GREEDY:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    p = plain_probs(logits, params)
    if params.contract is Contract.COUPLED:
        key = stream_key(params.seed, choice, position, Purpose.TOKEN)
        tempered = [logit / params.temperature if prob > 0.0 else -inf for logit, prob in zip(logits, p, strict=True)]
        return max(range(len(p)), key=lambda token: tempered[token] + gumbel_one(key, token))
    if draft is not None and uniform(params.seed, choice, position, Purpose.ACCEPT) < p[draft] / q[draft]:
        return draft
    excess = [max(prob - q.get(token, 0.0), 0.0) for token, prob in enumerate(p)]
    if sum(excess) <= 0.0:
        assert draft is not None, "p sums to one"
        return draft
    return plain_inverse_cdf(excess, uniform(params.seed, choice, position, Purpose.RESAMPLE))

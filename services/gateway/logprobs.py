"""Log-probabilities in an answer: chat's form, the completions' form, and vLLM's form for a prompt.

All are the target's raw ones (`TokenLogprobs`). `offset` counts characters of the answer's text before a token; tokens
past the end of the text (a stop string, the end-of-text token) are counted in `usage` and so have an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from seqmtp_serve.request import TokenLogprobs
from services.gateway.token_names import TokenName, TokenNames


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """One token of an answer or its prompt. `logprob` None: a prompt begins with it."""

    name: TokenName
    offset: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[TokenName, float], ...] = ()


def scored_tokens(
    names: TokenNames, token_ids: Sequence[int], offsets: Sequence[int], scores: Sequence[TokenLogprobs | None]
) -> tuple[ScoredToken, ...]:
    """Names and numbers together. Pure but for the memory of `names`."""
    return tuple(
        ScoredToken(name=names[token], offset=offset)
        if score is None
        else ScoredToken(
            name=names[token],
            offset=offset,
            logprob=score.logprob,
            rank=score.rank,
            top=tuple(zip(map(names.__getitem__, score.top_ids), score.top_logprobs, strict=True)),
        )
        for token, offset, score in zip(token_ids, offsets, scores, strict=True)
    )


def chat_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """`choices[].logprobs` of chat."""

    def entry(name: TokenName, logprob: float | None) -> dict[str, Any]:
        return {"token": name.text, "logprob": logprob, "bytes": list(name.utf8)}

    content = [
        entry(one.name, one.logprob) | {"top_logprobs": [entry(name, score) for name, score in one.top]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """`choices[].logprobs` of completions: the most likely, and the token itself if it is not among them."""
    return {
        "tokens": [one.name.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_by_text(one) for one in tokens],
        "text_offset": [one.offset for one in tokens],
    }


def prompt_logprobs(tokens: Sequence[ScoredToken], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the token itself and the `num_top` most likely; null for the first."""

    def entry(name: TokenName, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": name.text}

    return [
        None
        if one.logprob is None
        else {str(one.name.token_id): entry(one.name, one.logprob, one.rank)}
        | {
            str(name.token_id): entry(name, score, rank)
            for rank, (name, score) in enumerate(one.top[:num_top], 1)
            if name != one.name
        }
        for one in tokens
    ]


def with_top(tokens: Sequence[ScoredToken], num_top: int) -> tuple[ScoredToken, ...]:
    """The same with at most `num_top` of the most likely."""
    return tuple(replace(one, top=one.top[:num_top]) for one in tokens)


def _by_text(one: ScoredToken) -> dict[str, float] | None:
    if one.logprob is None:
        return None
    found: dict[str, float] = {}
    for name, score in one.top:
        found.setdefault(name.text, score)  # of two tokens spelled alike the likelier
    found.setdefault(one.name.text, one.logprob)
    return found

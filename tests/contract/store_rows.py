"""Requests, rows and commits for store tests."""

from __future__ import annotations

from collections.abc import Sequence

from seqmtp_serve.frontier.ancestry import digest_of
from seqmtp_serve.ports import Commit
from seqmtp_serve.request import CommittedRow, FinishReason, Request, SamplingParams

PROMPT = (1, 2, 3)


def a_request(request_id: str) -> Request:
    params = SamplingParams(temperature=0.8, seed=2**63, seeded=True, max_tokens=9, stop=("\n\n", "é"))
    return Request(request_id=request_id, prompt_ids=PROMPT, params=params, eos_token_ids=(2,))


def tokens_of(version: int) -> tuple[int, ...]:
    """Another row for each version, of one to three tokens."""
    return tuple(100 * version + place for place in range(1 + version % 3))


def a_commit(
    request_id: str,
    version: int,
    *,
    epoch: int = 1,
    rows: Sequence[tuple[int, ...]] | None = None,
    finish: FinishReason | None = None,
) -> Commit:
    """Row `version` of a request whose rows are `tokens_of(1), tokens_of(2)...` unless `rows` says otherwise."""
    history = [tokens_of(step) for step in range(1, version + 1)] if rows is None else list(rows)
    row = CommittedRow(
        request_id=request_id,
        version=version,
        tokens=history[-1],
        drafted=3,
        accepted=max(0, len(history[-1]) - 1),
        origins="a" * (len(history[-1]) - 1) + "c" * bool(history[-1]),
        finish=finish,
        stop_reason=None if finish is None else "é",
        timings_ms={"verify": 1.5},
    )
    return Commit(epoch=epoch, row=row, digest=digest_of(PROMPT, history))

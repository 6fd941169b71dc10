"""What a request's record keeps for whoever answers it later: the head of the answer, and what it was asked with.

It lies in the record's `meta` beside labels for logs. Every choice's record has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from seqmtp_serve.errors import RequestNotFound
from seqmtp_serve.ports import Snapshot
from services.gateway.body import GenerationBody
from services.gateway.job import Job
from services.gateway.reasoning import Thought

ANSWER, BODY, BACKGROUND = "answer", "body", "background"
_UNASKED = {"stream", "stream_options"}  # how the answer is delivered, not what it is


def digest_of(body: GenerationBody, prefix: str) -> str:
    """What a body asks for: equal for bodies that differ in how the answer is delivered only."""
    asked = json.dumps(body.model_dump(mode="json", exclude=_UNASKED, exclude_none=True), sort_keys=True)
    return blake2b(f"{prefix}\n{asked}".encode(), digest_size=16).hexdigest()


def job_id_of(key: str, prefix: str) -> str:
    """The answer's id for an Idempotency-Key: the same key is the same request, wherever it arrives."""
    return f"{prefix}-{blake2b(key.encode(), digest_size=16, person=b'seqmtp.idem').hexdigest()}"


def pack_letterhead(job: Job) -> dict[str, str]:
    """The part of a job that its requests do not hold."""
    answer = {
        "id": job.id,
        "created": job.created,
        "model": job.model,
        "choices": len(job.choices),
        "prompt_tokens": job.num_prompt_tokens,
        "include_usage": job.include_usage or not job.stream,
        "continuous_usage": job.continuous_usage,
        "trace": job.trace,
        "system_fingerprint": job.system_fingerprint,
        "echo": job.echo,
        "functions": list(job.functions),
        "one_call": job.one_call,
        "thought": job.thought,
        "told": dict(job.told),
        "prompt_logprobs": job.prompt_logprobs,
    }
    packed = {ANSWER: json.dumps(answer, separators=(",", ":")), BODY: job.body_digest}
    return packed | ({BACKGROUND: "1"} if job.background else {})


def num_choices(meta: Mapping[str, str]) -> int:
    """Of the answer that a record is part of. Raises RequestNotFound for a record without a letterhead."""
    if ANSWER not in meta:
        raise RequestNotFound("The request was not made through this API.")
    return int(json.loads(meta[ANSWER])["choices"])


def choice_ids(job_id: str, number: int) -> list[str]:
    """The request ids of an answer's choices."""
    return [job_id] if number == 1 else [f"{job_id}.{index}" for index in range(number)]


def unpack_letterhead(records: Sequence[Snapshot]) -> Job:
    """The job whose choices these records are, as a stream."""
    answer = json.loads(records[0].meta[ANSWER])
    return Job(
        id=answer["id"],
        created=answer["created"],
        model=answer["model"],
        choices=tuple(record.request for record in records),
        num_prompt_tokens=answer["prompt_tokens"],
        stream=True,
        include_usage=answer["include_usage"],
        continuous_usage=answer["continuous_usage"],
        trace=answer["trace"],
        system_fingerprint=answer["system_fingerprint"],
        background=BACKGROUND in records[0].meta,
        body_digest=records[0].meta[BODY],
        echo=answer.get("echo", False),
        functions=tuple(answer.get("functions", ())),
        one_call=answer.get("one_call", False),
        thought=Thought(answer.get("thought", "")),
        told=answer.get("told", {}),
        prompt_logprobs=answer.get("prompt_logprobs"),
    )

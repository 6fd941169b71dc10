"""The response object of /v1/responses, and the one message that it has where nothing but text was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seqmtp_serve.errors import SeqMTPError
from seqmtp_serve.request import FinishReason
from services.gateway.job import Job
from services.gateway.logprobs import ScoredToken, chat_logprobs
from services.gateway.tally import Tally

PREFIX = "resp"
Logprobs = list[dict[str, Any]]


def response_object(
    job: Job,
    status: str,
    output: Sequence[dict[str, Any]] = (),
    tally: Tally | None = None,
    error: SeqMTPError | None = None,
) -> dict[str, Any]:
    """OpenAI's object, with the speculation metrics beside it once it is over."""
    told: dict[str, Any] = {"metadata": {}, "temperature": 1.0, "top_p": 1.0, "background": job.background} | dict(
        job.told
    )
    return {
        "id": job.id,
        "object": "response",
        "created_at": float(job.created),
        "status": status,
        "error": None if error is None else {"code": "server_error", "message": str(error)},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": job.model,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "usage": None if tally is None else usage_of(tally),
        **told,
        **({} if tally is None else {"metrics": tally.metrics()}),
    }


def usage_of(tally: Tally) -> dict[str, Any]:
    """The same counts under this route's names."""
    usage = tally.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": tally.num_reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }


def item_id(job: Job) -> str:
    """The id of the response's only item."""
    return f"msg-{job.id.partition('-')[2]}"


def message_item(job: Job, status: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The output item."""
    return {"id": item_id(job), "type": "message", "role": "assistant", "status": status, "content": list(parts)}


def text_part(text: str, logprobs: Logprobs) -> dict[str, Any]:
    """The content part."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def logprobs_of(scored: Sequence[ScoredToken]) -> Logprobs:
    """Chat's entries are this route's too."""
    found: Logprobs = chat_logprobs(scored)["content"]
    return found


def status_after(finish: FinishReason) -> str:
    """The status of a response whose text is over."""
    return "incomplete" if finish is FinishReason.LENGTH else "completed"


def has_items(job: Job) -> bool:
    """Whether the output may be more than one message of text."""
    return bool(job.functions or job.thought)

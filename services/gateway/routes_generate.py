"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.gateway.body import GenerationBody
from services.gateway.chat_body import ChatBody
from services.gateway.completion_body import CompletionBody
from services.gateway.gateway import Gateway
from services.gateway.openapi import answers
from services.gateway.refused import judge_extras
from services.gateway.serve_answer import serve_answer
from services.gateway.shapes import ChatShape, CompletionShape

MAX_LABEL_LEN = 512


def generation_routes(gateway: Gateway) -> APIRouter:
    """The two routes over one gateway."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/chat/completions", responses=answers("chat.completion.chunk"), response_class=Response)
    async def chat(body: ChatBody, http: Request) -> Response:
        """Answer a conversation."""
        judge_extras(body.model_extra or {})
        status = await gateway.board.check_model(body.model)
        messages = [message.to_template(position) for position, message in enumerate(body.messages)]
        prompt = await gateway.text.encode_chat(messages)
        shape = ChatShape()
        job = gateway.plan(body, [prompt], status, shape, prompt_field="messages", budget=body.budget)
        return await serve_answer(http, job, shape, gateway.deltas(job, labels(body, http)))

    @routes.post("/v1/completions", responses=answers("text_completion"), response_class=Response)
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Continue one or several texts."""
        judge_extras(body.model_extra or {})
        status = await gateway.board.check_model(body.model)
        prompts = [
            await gateway.text.encode(prompt, add_special_tokens=True)
            if isinstance(prompt, str)
            else gateway.text.check_ids(prompt, "prompt")
            for prompt in body.prompts
        ]
        shape = CompletionShape()
        job = gateway.plan(body, prompts, status, shape, prompt_field="prompt", budget=body.budget)
        return await serve_answer(http, job, shape, gateway.deltas(job, labels(body, http)))

    return routes


def labels(body: GenerationBody, http: Request) -> Mapping[str, str]:
    """What is kept with the request's record for whoever reads logs: ids and the trace it belongs to."""
    found = {
        "http_request_id": http.scope.get("state", {}).get("request_id"),
        "caller_request_id": body.request_id,
        "traceparent": http.headers.get("traceparent"),
    }
    return {name: value[:MAX_LABEL_LEN] for name, value in found.items() if value}

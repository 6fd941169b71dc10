"""POST /tokenize and /detokenize, GET /tokenizer_info, as vLLM has them, for prompts of an exact length."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from seqmtp_serve.errors import InvalidField
from services.gateway.body import Body, TokenId
from services.gateway.chat_body import Messages
from services.gateway.gateway import Gateway
from services.gateway.openapi import problems
from services.gateway.refused import REFUSED, judge_extras
from services.gateway.tools.fields import Tools, tool_use

MAX_TOKENS = 2**18  # of one /detokenize: reading a body of millions would keep every other request waiting

# What would change the ids and is not supported.
OF_THE_PROMPT = (
    "chat_template",
    "continue_final_message",
    "documents",
    "truncate_prompt_tokens",
    "mm_processor_kwargs",
)


class TokenizeBody(Body):
    """A text (`prompt`) or a conversation (`messages`): exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class TokenizeAnswer(BaseModel):
    """The ids; `token_strs` if it was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    """Token ids to read."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


class DetokenizeAnswer(BaseModel):
    """Their text, special tokens included."""

    prompt: str


class TokenizerInfo(BaseModel):
    """What a client needs to tokenise through this server (lm-eval's remote tokenizer asks for it)."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


def token_routes(gateway: Gateway) -> APIRouter:
    """Both routes over one gateway."""
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokenize", responses=problems(400, 404, 503))
    async def tokenize(body: TokenizeBody) -> TokenizeAnswer:
        """Token ids of a text or a conversation."""
        judge_extras(body.model_extra or {}, {name: REFUSED[name] for name in OF_THE_PROMPT})
        if (body.prompt is None) == (body.messages is None):
            raise InvalidField("Give either 'prompt' or 'messages'.", param="prompt")
        status = await gateway.board.check_model(body.model)
        if body.messages is not None:
            messages = [message.to_template(position) for position, message in enumerate(body.messages)]
            turn = body.add_generation_prompt is not False
            more = body.chat_template_kwargs
            tools = tool_use(body.tools, None, None).told
            ids = await gateway.text.encode_chat(messages, tools=tools, add_generation_prompt=turn, more=more)
        else:
            ids = await gateway.text.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        return TokenizeAnswer(
            count=len(ids),
            max_model_len=status.max_model_len,
            tokens=ids,
            token_strs=await gateway.text.names(ids) if body.return_token_strs else None,
        )

    @routes.post("/detokenize", responses=problems(400, 404, 503))
    async def detokenize(body: DetokenizeBody) -> DetokenizeAnswer:
        """The text of token ids."""
        await gateway.board.check_model(body.model)
        ids = gateway.text.check_ids(body.tokens, "tokens")
        return DetokenizeAnswer(prompt=await gateway.text.decode(ids))

    @routes.get("/tokenizer_info", responses=problems(503))
    async def tokenizer_info() -> TokenizerInfo:
        """The tokenizer's special tokens and chat template, under Hugging Face's names."""
        status, text = await gateway.board.serving(), gateway.text
        end = text.tokenizer.id_to_token(text.eos_token_ids[0]) if text.eos_token_ids else None
        return TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            vocab_size=text.vocab_size,
            model_max_length=status.max_model_len,
            add_bos_token=text.bos_token_id is not None,
            bos_token=None if text.bos_token_id is None else text.tokenizer.id_to_token(text.bos_token_id),
            eos_token=end,
            pad_token=end,
            chat_template=text.template.source if text.template else None,
        )

    return routes

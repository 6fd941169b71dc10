"""What both generation routes take: strictly typed fields, each nullable as OpenAI's clients send them.

A bool is no number, a number no string, NaN and infinity are nothing. Fields of no model here are kept apart
(`model_extra`) for `refused.py` to judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from seqmtp_serve.request import MAX_LOGPROBS
from services.gateway.strict_body import Body as Body
from services.gateway.strict_body import StopString
from services.gateway.strict_body import TokenId as TokenId
from services.gateway.structured_body import Choices, GrammarText, ResponseFormat, Schema, StructuredOutputs

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_DEPTH = 64
MAX_BIASES = 1024
MAX_ALLOWED = 2**18
MAX_BAD_WORDS = 256

# A union's branch is chosen by the value's JSON type, so that an error names the one branch that was meant. Branch tags
# start with "~" and are left out of `param` (problems.py).
Stop = Annotated[
    Annotated[StopString, Tag("~text")]
    | Annotated[Annotated[list[StopString], Field(max_length=MAX_STOPS)], Tag("~list")],
    Discriminator(lambda value: "~list" if isinstance(value, list) else "~text"),
]


class StreamOptions(Body):
    """`include_usage`: one more chunk with the totals; `continuous_usage_stats`: running totals on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: accepted, none is added


class SpeculationOptions(BaseModel):
    """How this request is drafted. It never changes the text, only the speed. `trace`: each chunk says its origins."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    enabled: bool | None = None
    max_depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | None = None
    trace: bool | None = None


NumTop = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLogprobs:
    """Log-probabilities with each token of the output and of the prompt, and so many of the most likely ones.

    `echo`: the text begins with the prompt. `shown_prompt`: the prompt's are given for themselves.
    """

    output: int | None = None
    prompt: int | None = None
    shown_prompt: int | None = None
    echo: bool = False


class GenerationBody(Body):
    """Fields that chat and completions share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None  # wins over `max_tokens`
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_CHOICES)] | None = None
    ignore_eos: bool | None = None
    # What shapes the target's logits before temperature: shaping_fields.py.
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = None
    # What constrains the answer to a grammar: structured_fields.py.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    background: bool | None = None  # goes on without a reader; without `stream` the answer is to be asked for later
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # place in the queue: lower goes first
    # Labels: they reach the record or nothing, and never the text.
    user: str | None = None
    store: bool | None = None  # every answer is kept for the replay window, none for longer
    metadata: dict[str, Any] | None = None
    request_id: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def wanted_format(self) -> tuple[str, ResponseFormat | None]:
        """The field that says what form the text has, and its value."""
        return "response_format", self.response_format

    def wanted_logprobs(self) -> WantedLogprobs:
        """As asked. Raises InvalidField for fields that do not fit together."""
        return WantedLogprobs()

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def trace(self) -> bool:
        """Whether chunks carry their tokens' origins."""
        return bool(self.speculation and self.speculation.trace)

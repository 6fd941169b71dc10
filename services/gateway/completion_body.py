"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from seqmtp_serve.errors import InvalidField
from services.gateway.body import MAX_CHOICES, GenerationBody, NumTop, TokenId, WantedLogprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _shape(value: Any) -> str:
    """Which of the four forms a prompt has, by its first element."""
    if not isinstance(value, list):
        return "~text"
    first = value[0] if value else ""
    return "~ids_list" if isinstance(first, list) else "~texts" if isinstance(first, str) else "~ids"


Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)], Tag("~texts")]
    | Annotated[Ids, Tag("~ids")]
    | Annotated[Annotated[list[Ids], Field(min_length=1, max_length=MAX_CHOICES)], Tag("~ids_list")],
    Discriminator(_shape),
]


class CompletionBody(GenerationBody):
    """Text to continue: a string, a list of them, token ids, or a list of those."""

    prompt: Prompt
    echo: bool | None = None
    add_special_tokens: bool | None = None  # None: those that begin every text of this model
    logprobs: NumTop | None = None
    prompt_logprobs: NumTop | None = None

    def wanted_logprobs(self) -> WantedLogprobs:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidField("'prompt_logprobs' is not for streams.", param="prompt_logprobs")
        of_prompt = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return WantedLogprobs(
            output=self.logprobs,
            prompt=max((each for each in of_prompt if each is not None), default=None),
            shown_prompt=self.prompt_logprobs,
            echo=bool(self.echo),
        )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]

    @property
    def budget(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

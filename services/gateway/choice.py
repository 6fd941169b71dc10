"""Committed rows to text: one choice's deltas, and several choices' deltas as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from tokenizers import Tokenizer

from seqmtp_serve.errors import InternalError, NoTokenLeft, RequestCancelled, SeqMTPError
from seqmtp_serve.frontier.finish import TextAssembler
from seqmtp_serve.request import CommittedRow, FinishReason, Request
from seqmtp_serve.tasks import end_tasks
from services.detokenizer import Detokenizer
from services.gateway.logprobs import ScoredToken, scored_tokens
from services.gateway.reasoning import ReasoningText
from services.gateway.token_names import TokenNames
from services.gateway.tools.parser import CallPart
from services.gateway.tools.tool_text import ToolText


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """The prompt as its tokens read, without the token that begins every prompt."""

    text: str
    scored: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one committed row adds to choice `index`.

    `texts` is what each of its tokens lets be shown: often nothing, a stop string or a character may be forming.
    `pieces` is what each decodes to, before anything is held back or cut. `scored` has an entry for each token where
    log-probabilities are asked for; `prompt` comes with the first row where the prompt is part of the answer.
    """

    index: int
    row: CommittedRow
    texts: tuple[str, ...]
    pieces: tuple[str, ...]
    scored: tuple[ScoredToken, ...] = ()
    prompt: PromptText | None = None
    calls: tuple[tuple[CallPart, ...], ...] = ()  # what each token adds to tool calls, where tools were offered
    num_calls: int = 0  # up to here; 0 where the text ended amid one
    reasoning: tuple[str, ...] = ()  # what each token adds to the thought before the answer, where that is told apart
    num_reasoning: int = 0  # of the tokens

    @property
    def text(self) -> str:
        """What the row lets be shown."""
        return "".join(self.texts)


class ChoiceText:
    """The shown text of one output, row by row. The coordinator's own finish check decides where it ends.

    `echo`: the text begins with the prompt. `bos_token_id` begins every prompt and is no part of its text.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        echo: bool = False,
        bos_token_id: int | None = None,
        tools: ToolText | None = None,
        reasoning: ReasoningText | None = None,
    ) -> None:
        self._request, self._tokenizer, self._echo, self._bos = request, tokenizer, echo, bos_token_id
        self._assembler = TextAssembler(request)
        self._detokenize = Detokenizer(tokenizer, request.prompt_ids)
        self._names = TokenNames(tokenizer)
        self._offset = 0  # characters of the text so far, before anything is held back or cut
        self._tools, self._reasoning = tools, reasoning

    def delta(self, index: int, row: CommittedRow) -> Delta:
        """What the row adds to choice `index`. Raises as `push` does."""
        wants_prompt = self._echo or self._request.params.prompt_logprobs is not None
        prompt = self._prompt(row) if wants_prompt and row.version == 1 else None
        texts, pieces = self.push(row)
        scored: tuple[ScoredToken, ...] = ()
        if self._request.params.logprobs is not None:
            scored = scored_tokens(self._names, row.tokens, self._offsets(pieces), row.logprobs)
        found = Delta(index=index, row=row, texts=texts, pieces=pieces, scored=scored, prompt=prompt)
        ended, is_thought = row.finish is not None, [False] * len(texts)
        if self._reasoning is not None:
            parts = self._reasoning.push(row.tokens, texts, ended=ended)
            texts, is_thought = tuple(part.text for part in parts), [part.is_thought for part in parts]
            thoughts = tuple(part.reasoning for part in parts)
            found = replace(found, texts=texts, reasoning=thoughts, num_reasoning=sum(is_thought))
        if self._tools is None:
            return found
        said = self._tools.push(row.tokens, texts, ended=ended, quiet=is_thought)
        return replace(
            found,
            texts=tuple(one.content for one in said),
            calls=tuple(one.calls for one in said),
            num_calls=self._tools.num_calls,
        )

    def push(self, row: CommittedRow) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What each token of the row lets be shown, and what it decodes to.

        Both depend on the tokens so far alone, however they were cut into rows: so a text can go on after any token.
        Raises InternalError if coordinator and gateway disagree about where the text ends.
        """
        pieces = tuple(self._detokenize(token) for token in row.tokens)
        texts = list(map(self._assembler.push, row.tokens, pieces))
        finish = self._assembler.finish
        if (finish and finish.reason) != row.finish:
            raise InternalError(f"row {row.version} ends as {row.finish}, but its text as {finish and finish.reason}")
        if row.finish is FinishReason.LENGTH:
            texts[-1] += self._detokenize.flush()
        return tuple(texts), pieces

    def _prompt(self, row: CommittedRow) -> PromptText:
        detokenize = Detokenizer(self._tokenizer, special=True)
        ids = self._request.prompt_ids
        pieces = ["" if token == self._bos and not place else detokenize(token) for place, token in enumerate(ids)]
        pieces[-1] += detokenize.flush()
        offsets = self._offsets(pieces)
        if not self._echo:
            self._offset = 0
        scored: tuple[ScoredToken, ...] = ()
        if self._request.params.prompt_logprobs is not None:
            scored = scored_tokens(self._names, ids, offsets, (None, *row.prompt_logprobs))
        return PromptText(text="".join(pieces), scored=scored)

    def _offsets(self, pieces: Sequence[str]) -> list[int]:
        """Where each piece begins."""
        ends = list(accumulate(map(len, pieces), initial=self._offset))
        self._offset = ends[-1]
        return ends[:-1]


async def read_choice(
    rows: AsyncGenerator[CommittedRow, None], text: ChoiceText, index: int
) -> AsyncGenerator[Delta, None]:
    """The deltas of one choice, one a committed row. Ends after the row that finishes it; raises any typed error."""
    async with contextlib.aclosing(rows):
        async for row in rows:
            if row.finish is FinishReason.CANCELLED:
                raise RequestCancelled("The request was cancelled before its text was over.")
            if row.finish is FinishReason.ERROR and row.stop_reason == NoTokenLeft.code:
                raise NoTokenLeft("The tokens that this request allows and bans leave none that may come.")
            if row.finish is FinishReason.ERROR:
                raise InternalError(f"The generation was ended before its text was: {row.stop_reason or row.finish}.")
            yield text.delta(index, row)
            if row.finish is not None:
                return
    raise InternalError("The generation ended without a last row.")


async def merge(streams: list[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """All deltas as they come; those of one choice stay in order. The first error ends all; closing closes all."""
    if len(streams) == 1:  # the usual case needs no task between reader and writer
        async with contextlib.aclosing(streams[0]) as only:
            async for delta in only:
                yield delta
        return
    queue: asyncio.Queue[Delta | SeqMTPError | None] = asyncio.Queue(maxsize=1)

    async def pump(stream: AsyncIterator[Delta]) -> None:
        try:
            async for delta in stream:
                await queue.put(delta)
            await queue.put(None)
        except SeqMTPError as error:
            await queue.put(error)
        except Exception as error:
            await queue.put(InternalError(f"{type(error).__name__}: {error}"))

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(pumps)
        while left:
            match await queue.get():
                case None:
                    left -= 1
                case SeqMTPError() as error:
                    raise error
                case delta:
                    yield delta
    finally:
        await end_tasks(*pumps)
        for stream in streams:
            await stream.aclose()

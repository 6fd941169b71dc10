"""Committed rows to text: one choice's deltas, and several choices' deltas as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from seqmtp_serve.errors import InternalError, NoTokenLeft, RequestCancelled, SeqMTPError
from seqmtp_serve.frontier.finish import TextAssembler
from seqmtp_serve.request import CommittedRow, FinishReason, Request
from services.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one committed row adds to choice `index`.

    `texts` is what each of its tokens lets be shown: often nothing, a stop string or a character may be forming.
    `pieces` is what each decodes to, before anything is held back or cut.
    """

    index: int
    row: CommittedRow
    texts: tuple[str, ...]
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        """What the row lets be shown."""
        return "".join(self.texts)


class ChoiceText:
    """The shown text of one output, row by row. The coordinator's own finish check decides where it ends."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._assembler = TextAssembler(request)
        self._detokenize = Detokenizer(tokenizer, request.prompt_ids)

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


async def read_choice(
    rows: AsyncGenerator[CommittedRow, None], request: Request, tokenizer: Tokenizer, index: int
) -> AsyncGenerator[Delta, None]:
    """The deltas of one choice, one a committed row. Ends after the row that finishes it; raises any typed error."""
    text = ChoiceText(request, tokenizer)
    async with contextlib.aclosing(rows):
        async for row in rows:
            if row.finish is FinishReason.CANCELLED:
                raise RequestCancelled("The request was cancelled before its text was over.")
            if row.finish is FinishReason.ERROR and row.stop_reason == NoTokenLeft.code:
                raise NoTokenLeft("The tokens that this request allows and bans leave none that may come.")
            if row.finish is FinishReason.ERROR:
                raise InternalError(f"The generation was ended before its text was: {row.stop_reason or row.finish}.")
            texts, pieces = text.push(row)
            yield Delta(index=index, row=row, texts=texts, pieces=pieces)
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
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

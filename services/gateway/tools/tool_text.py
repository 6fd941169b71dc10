"""One choice's tool calls, token by token: what each token adds to the content and to calls."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from services.gateway.tools.dialects import Dialect
from services.gateway.tools.parser import Said, ToolParser


class ToolText:
    """A parser fed with shown text. Tags that are special tokens, which texts leave out, are put back for it."""

    def __init__(self, parser: ToolParser, dialect: Dialect, tokenizer: Tokenizer) -> None:
        self._parser = parser
        self._tags = {token: tag for tag, token in special_tags(dialect.tags, tokenizer).items()}

    @property
    def num_calls(self) -> int:
        """So far; 0 where the text ended amid one."""
        return 0 if self._parser.is_cut else self._parser.num_calls

    def push(
        self, tokens: Sequence[int], texts: Sequence[str], *, ended: bool, quiet: Sequence[bool] = ()
    ) -> list[Said]:
        """What each token adds; `ended`: they are the last ones, and what was held comes with the last of them.

        `quiet` tokens are part of a thought: a tag there begins no call.
        """
        tags = [self._tags.get(token, "") for token in tokens]
        for place, is_quiet in enumerate(quiet):
            tags[place] = "" if is_quiet else tags[place]
        said = [self._parser.push(tag + text) for tag, text in zip(tags, texts, strict=True)]
        if ended and said:
            said[-1] += self._parser.finish()
        return said


def special_tags(tags: Sequence[str], tokenizer: Tokenizer) -> dict[str, int]:
    """The tags that are single tokens which texts leave out."""
    ids = {tag: tokenizer.token_to_id(tag) for tag in tags}
    return {tag: token for tag, token in ids.items() if token is not None and not tokenizer.decode([token])}

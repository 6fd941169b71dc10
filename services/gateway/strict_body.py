"""What every body is made of: the strict base model, and the small types that several bodies share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_WITHOUT_TEXT = frozenset({int, float, bool, type(None)})


class Body(BaseModel):
    """A request body. Lenient only about fields nobody declared."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    @field_validator("*", mode="after")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """JSON can spell half a surrogate pair, which is no character and has no tokens."""
        if not all(map(is_text, _strings(value))):
            raise ValueError("half a surrogate pair is not text")
        return value


def is_text(value: str) -> bool:
    """Whether it is made of characters: no half of a surrogate pair."""
    return value.encode(errors="ignore").decode() == value


def _strings(value: Any) -> Iterator[str]:
    """Every string in a piece of JSON, names with them. Parts that are bodies have looked at their own."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, list) and not _WITHOUT_TEXT.issuperset(map(type, part)):
            parts += part
        elif isinstance(part, dict):
            parts += [*part, *part.values()]

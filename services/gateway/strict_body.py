"""What every body is made of: the strict base model, and the small types that several bodies share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class Body(BaseModel):
    """A request body. Lenient only about fields nobody declared."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    @field_validator("*", mode="after")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """JSON can spell half a surrogate pair, which is no character and has no tokens."""
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text.encode(errors="ignore").decode() != text:
                raise ValueError("half a surrogate pair is not text")
        return value

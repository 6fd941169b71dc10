"""One thing wrong with a checkpoint, and which tensor or field it is about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ProblemKind(StrEnum):
    """What is wrong with a tensor or a declared field."""

    MISSING = "missing"
    UNEXPECTED = "unexpected"
    SHAPE = "shape"
    DTYPE = "dtype"
    NON_FINITE = "non_finite"
    UNREADABLE = "unreadable"
    FINGERPRINT = "fingerprint"
    DECLARATION = "declaration"
    VALUES = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`subject` is the full tensor name, or the manifest or config field."""

    kind: ProblemKind
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.detail}"

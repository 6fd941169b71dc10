"""Which kernels can run here: each backend is probed, none is assumed.

A backend says in a sentence why it cannot run on this machine (`unavailable`) or for this case (`refuses`); the first
in order of preference that says neither is used. The torch reference is last in every list and refuses nothing: it is
the definition that the others are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from seqmtp_serve.config import AUTO
from seqmtp_serve.errors import InvalidField


class Backend(Protocol):
    """What every backend of every kind answers before it is used. An empty string is a yes."""

    @property
    def name(self) -> str: ...

    def unavailable(self) -> str:
        """Why it cannot run on this machine: a library that is not installed, a device that is not there."""
        ...

    def refuses(self, case: Any) -> str:
        """Why it cannot run this case: a head size it was not compiled for, a dtype."""
        ...


B = TypeVar("B", bound=Backend)


class Registry(Generic[B]):
    """The backends of one kind, best first. `setting` is its word in `config.Kernels`."""

    def __init__(self, kind: str, backends: Sequence[B], *, setting: str = "") -> None:
        self.kind, self.backends, self.setting = kind, tuple(backends), setting or kind

    def choose(self, case: object, *, named: str = AUTO) -> B:
        """The best backend for `case`. Raises InvalidField, with its reason, when the one `named` cannot run it."""
        asked = [backend for backend in self.backends if named in (AUTO, backend.name)]
        if not asked:
            known = ", ".join(backend.name for backend in self.backends)
            raise InvalidField(f"{self.kind} backend {named!r} is not one of {AUTO}, {known}", param=self._param)
        for backend in asked:
            reason = backend.unavailable() or backend.refuses(case)
            if not reason:
                return backend
        message = f"{self.kind} backend {asked[-1].name} cannot run here: {reason}; {AUTO} takes the best that can"
        raise InvalidField(message, param=self._param)

    def choose_or_best(self, case: object, *, named: str) -> B:
        """The one `named` if it can run `case`, else the best. Raises InvalidField for a name that is not known."""
        fits = any(one["name"] == named and not one["reason"] for one in self.report(case))
        known = any(backend.name == named for backend in self.backends)
        return self.choose(case, named=AUTO if known and not fits else named)

    def report(self, case: object) -> list[dict[str, str]]:
        """Every backend and why it is not used, in order; the first with no reason is the one chosen."""
        return [
            {"kind": self.kind, "name": backend.name, "reason": backend.unavailable() or backend.refuses(case)}
            for backend in self.backends
        ]

    @property
    def _param(self) -> str:
        return f"kernels.{self.setting}"

"""The Lua scripts beside this file, by name and SHA1. Each file's head lists its keys, arguments and results."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha1
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One atomic transaction on the keys of one request, or of one API key."""

    name: str
    text: str
    sha: str = field(init=False)  # what EVALSHA calls it by: asked for with every row

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", sha1(self.text.encode(), usedforsecurity=False).hexdigest())


def _load(name: str) -> Script:
    return Script(name=name, text=files("services.store").joinpath(f"{name}.lua").read_text())


ACQUIRE = _load("acquire")
COMMIT = _load("commit")
FINISH = _load("finish")
CANCEL = _load("cancel")
SNAPSHOT = _load("snapshot")
RENEW = _load("renew")
ATTEND = _load("attend")
LIMIT = _load("limit")
ALL = (ACQUIRE, COMMIT, FINISH, CANCEL, SNAPSHOT, RENEW, ATTEND, LIMIT)

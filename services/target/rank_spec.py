"""What a leader tells a rank when it starts it: everything the rank needs to join, in one JSON text."""

from __future__ import annotations

import json
from dataclasses import dataclass

from services.settings import Settings, from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """`gang_id` is new at each start of the group: a rank of an earlier one cannot join by mistake.

    `leader` is where the leader's Gang service listens, `rendezvous` where its key-value store does, both host:port.
    """

    gang_id: str
    rank: int
    world_size: int
    leader: str
    rendezvous: str
    settings: Settings

    def to_json(self) -> str:
        """With the settings' secrets in clear: for a pipe or an actor's argument, never for a log."""
        plain = {name: getattr(self, name) for name in ("gang_id", "rank", "world_size", "leader", "rendezvous")}
        return json.dumps({**plain, "settings": self.settings.to_json()})

    @classmethod
    def from_json(cls, text: str) -> RankSpec:
        """Inverse of `to_json`."""
        found = json.loads(text)
        return cls(**{**found, "settings": from_json(found["settings"])})

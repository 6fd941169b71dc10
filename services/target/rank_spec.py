"""What a leader tells a rank when it starts it: everything the rank needs to join, in one JSON text."""

from __future__ import annotations

import json
from dataclasses import dataclass

from seqmtp_serve.errors import InvalidField
from services.settings import Settings, from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """`gang_id` is new at each start of the group: a rank of an earlier one cannot join by mistake.

    `leader` is where the leader's Gang service listens, `rendezvous` where its key-value store does, both host:port.
    `settings` are the group's: who starts the rank, and so knows its host, gives it its device (`on_device_of`).
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


def on_device_of(settings: Settings, local_rank: int) -> Settings:
    """The settings of one rank of a group: `cuda` is the device of its place among those of its host.

    Raises InvalidField for a group on `cuda:N`: NCCL wants a device of its own for each rank.
    """
    engine, speculation = settings.engine, settings.speculation
    if engine.target_ranks > 1 and engine.device.startswith("cuda:"):
        message = f"device {engine.device} is one device, and the group has {engine.target_ranks} ranks"
        raise InvalidField(f"{message}: say cuda, and each takes its own", param="engine.device")
    own = {"cuda": f"cuda:{local_rank}"}
    engine = engine.model_copy(update={"device": own.get(engine.device, engine.device)})
    speculation = speculation.model_copy(update={"device": own.get(speculation.device or "", speculation.device)})
    return settings.model_copy(update={"engine": engine, "speculation": speculation})

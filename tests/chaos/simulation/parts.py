"""What a simulation is built of. The negative controls put something broken in one place."""

from __future__ import annotations

from dataclasses import dataclass

from seqmtp_serve.rounds import RoundDriver
from tests.chaos.simulation.client import SimClient
from tests.chaos.simulation.store import LoggedStore
from tests.chaos.simulation.target import SimTarget, SimTargetLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A class for each place."""

    store: type[LoggedStore] = LoggedStore
    target: type[SimTarget] = SimTarget
    link: type[SimTargetLink] = SimTargetLink
    driver: type[RoundDriver] = RoundDriver
    client: type[SimClient] = SimClient

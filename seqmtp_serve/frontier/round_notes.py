"""What a round's committed row does not say: why it had its depth, from which measurements, and how long it took.

Kept by the coordinator that made the round, while the request is live there; then handed to whoever keeps them with the
record. Bounded: a request's last `KEPT_ROUNDS`, and fewer where large batches make decisions large.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from seqmtp_serve.frontier.depth_choice import DepthChoice
from seqmtp_serve.ports import Snapshot

KEPT_ROUNDS = 256
KEPT_NUMBERS = 32_768  # of all decisions of one request: a quarter of a MiB
ENDED_REQUESTS = 1024  # whose notes wait to be kept; the oldest go


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundNote:
    """Of the round that committed row `version`.

    `depth` is how many drafts were asked for: of the MTP module or, if there are `copy_survivals`, of copies; these say
    how often the first, the first two, … were thought to be right. `draft_chances` are those of the module's drafts
    (`ports.Draft`), which were left out from the first below `floor`. `choice` is shared by all requests of the step,
    this one's place in it is `place`; None when nothing was weighed (bootstrap, a fixed depth). `depth` is below what
    it says where the budget, the group's limit, missing pages or a proposer that went away allow no more.
    """

    version: int
    depth: int
    reason: str = ""
    place: int = 0
    copy_survivals: tuple[float, ...] = ()
    draft_chances: tuple[float, ...] = ()
    floor: float = 0.0
    choice: DepthChoice | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLedger:
    """A request's rounds: its record has what each made, the notes (by version, of some rounds) why and how fast."""

    record: Snapshot
    notes: tuple[RoundNote, ...] = ()


class RoundNotes:
    """Notes by request: of live ones, and of ended ones until they are kept elsewhere. One event loop."""

    def __init__(self) -> None:
        self._live: dict[str, deque[RoundNote]] = {}
        self._numbers: dict[str, int] = {}
        self._ended: OrderedDict[str, tuple[RoundNote, ...]] = OrderedDict()

    def add(self, request_id: str, note: RoundNote) -> None:
        """One more round; the oldest go where there are too many."""
        notes = self._live.setdefault(request_id, deque())
        notes.append(note)
        numbers = self._numbers.get(request_id, 0) + _size(note)
        while len(notes) > KEPT_ROUNDS or (numbers > KEPT_NUMBERS and len(notes) > 1):
            numbers -= _size(notes.popleft())
        self._numbers[request_id] = numbers

    def of(self, request_id: str) -> tuple[RoundNote, ...]:
        """What is known here, in order of version."""
        return (*self._ended.get(request_id, ()), *self._live.get(request_id, ()))

    def end(self, request_id: str) -> None:
        """The request is live here no more."""
        notes = self._live.pop(request_id, None)
        self._numbers.pop(request_id, None)
        if notes:
            self._ended[request_id] = (*self._ended.pop(request_id, ()), *notes)
        while len(self._ended) > ENDED_REQUESTS:
            self._ended.popitem(last=False)

    def oldest_ended(self) -> tuple[str, tuple[RoundNote, ...]] | None:
        """The request that ended first and its notes, which stay here until they are said to be `kept`."""
        return next(iter(self._ended.items()), None)

    def kept(self, request_id: str, notes: tuple[RoundNote, ...]) -> None:
        """They are safe elsewhere. Of a request that ended here once more meanwhile all stay."""
        if self._ended.get(request_id) is notes:
            del self._ended[request_id]


def _size(note: RoundNote) -> int:
    """Numbers in the note's decision, about."""
    inputs = None if note.choice is None else note.choice.inputs
    return 0 if inputs is None else 4 * inputs.batch * len(inputs.times)

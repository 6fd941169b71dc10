"""What to do with a sequence the target refused, by the code of the refusal."""

from __future__ import annotations

from enum import StrEnum

from seqmtp_serve import errors

MAX_REPLAYS = 5  # without a committed row in between


class Remedy(StrEnum):
    """The next move for one sequence; the others go on."""

    REPLAY = "replay"  # the target's state does not fit the record: build it anew
    WAIT = "wait"  # the target is short of something: give up the place, try again later
    LET_GO = "let_go"  # a newer epoch owns the request
    FAIL = "fail"  # no retry can help: the record is to say so


_REMEDIES = {
    errors.StaleVersion.code: Remedy.REPLAY,
    errors.AncestryMismatch.code: Remedy.REPLAY,
    errors.IllegalTransition.code: Remedy.REPLAY,
    errors.ProtocolError.code: Remedy.REPLAY,
    errors.RequestNotFound.code: Remedy.REPLAY,
    errors.Overloaded.code: Remedy.WAIT,
    errors.NotReady.code: Remedy.WAIT,
    errors.Unavailable.code: Remedy.WAIT,
    errors.Fenced.code: Remedy.LET_GO,
}


def remedy(code: str, refusals: int) -> Remedy:
    """`refusals` counts earlier replays without a committed row in between.

    Several in a row can be chance (a broken stream's late release, a repeated frame); after `MAX_REPLAYS` the next will
    not help either.
    """
    found = _REMEDIES.get(code, Remedy.FAIL)
    return Remedy.FAIL if found is Remedy.REPLAY and refusals >= MAX_REPLAYS else found

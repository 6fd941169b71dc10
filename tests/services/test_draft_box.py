"""Waiting for drafts: bounded by the proposer's pace, and only once for one that hangs."""

import threading
import time

import pytest

from seqmtp_serve.ports import Draft
from seqmtp_serve.request import Ref
from services.target import draft_box
from services.target.draft_box import CEILING_S, FLOOR_S, SAMPLES, DraftBox


def ref(name: str, version: int = 1) -> Ref:
    return Ref(request_id=name, epoch=1, version=version, digest=bytes(16))


def draft(name: str, version: int = 1) -> Draft:
    return Draft(ref=ref(name, version), tokens=(version,))


def paced(seconds: float) -> DraftBox:
    """A box that has seen `SAMPLES` answers of this many seconds."""
    now = [0.0]
    box = DraftBox(clock=lambda: now[0])
    for version in range(1, SAMPLES + 1):
        box.expect([ref("pace", version)])
        now[0] += seconds
        box.put([draft("pace", version)])
    box.forget(["pace"])
    return box


def test_a_draft_that_is_there_is_returned_at_once():
    box = DraftBox()
    box.expect([ref("a")])
    box.put([draft("a")])
    assert box.collect([ref("a")], 1.0) == {"a": draft("a")}


def test_what_was_never_asked_for_is_not_waited_for():
    box = DraftBox()
    assert box.collect([ref("a")], 60.0) == {}
    assert not box.stalled


@pytest.mark.covers(130)
def test_a_draft_of_another_version_is_not_handed_out():
    box = DraftBox()
    box.expect([ref("a", 1)])
    box.expect([ref("a", 2)])
    box.put([draft("a", 1)])
    assert box.collect([ref("a", 2)], 0.0) == {}
    assert box.collect([ref("a", 1)], 0.0) == {}


def test_a_draft_of_another_epoch_or_ancestry_is_not_handed_out():
    box = DraftBox()
    box.expect([ref("a")])
    for other in (
        Ref(request_id="a", epoch=2, version=1, digest=bytes(16)),
        Ref(request_id="a", epoch=1, version=1, digest=b"x" * 16),
    ):
        box.put([Draft(ref=other, tokens=(1,))])
    assert box.collect([ref("a")], 0.0) == {}


def test_a_wait_ends_when_the_draft_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_box, "CEILING_S", 30.0)
    box = paced(30.0)
    box.expect([ref("a"), ref("b")])
    box.put([draft("a")])
    threading.Timer(0.02, box.put, [[draft("b")]]).start()
    assert box.collect([ref("a"), ref("b")], 60.0) == {"a": draft("a"), "b": draft("b")}


def test_what_came_in_time_is_returned_though_another_is_missing():
    box = paced(0.001)
    box.expect([ref("a"), ref("b")])
    box.put([draft("a")])
    assert box.collect([ref("a"), ref("b")], 60.0) == {"a": draft("a")}


def test_a_hung_peer_is_waited_for_once_until_it_answers_again():
    box = paced(0.001)
    box.expect([ref("a", 1)])
    assert box.collect([ref("a", 1)], 60.0) == {}
    assert (box.stalled, box.num_timeouts) == (True, 1)
    box.expect([ref("a", 2)])
    assert box.collect([ref("a", 2)], 60.0) == {}
    assert box.num_timeouts == 1, "the second round did not wait"
    box.put([draft("a", 1)])  # late, useless, but a sign of life
    assert not box.stalled


def test_the_wait_follows_the_pace_within_its_bounds():
    assert DraftBox().longest_wait_s == CEILING_S
    assert paced(0.001).longest_wait_s == FLOOR_S
    assert abs(paced(0.1).longest_wait_s - 0.4) < 1e-9
    assert paced(5.0).longest_wait_s == CEILING_S


def test_a_lost_peer_releases_whoever_waits():
    box = DraftBox()
    box.expect([ref("a")])
    answers: list[dict[str, Draft]] = []
    waiting = threading.Thread(target=lambda: answers.append(box.collect([ref("a")], 60.0)))
    waiting.start()
    time.sleep(0.01)
    box.clear()
    waiting.join(timeout=30)
    assert answers == [{}]
    assert not box.stalled


def test_a_refused_feed_is_not_waited_for():
    box = DraftBox()
    box.expect([ref("a")])
    box.refuse(ref("a"))
    assert box.collect([ref("a")], 60.0) == {}
    assert not box.stalled

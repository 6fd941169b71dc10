"""What callers are told who were turned away: it follows the pace of ends, and the number of those waiting."""

import pytest

from seqmtp_serve.frontier.turnover import LONGEST_S, SHORTEST_S, Turnover, bounded


def paced(interval_s: float, ends: int = 40) -> tuple[Turnover, float]:
    turnover = Turnover()
    for number in range(ends):
        turnover.ended(number * interval_s)
    return turnover, (ends - 1) * interval_s


def test_nothing_is_known_at_first() -> None:
    turnover = Turnover()
    assert turnover.refused(0.0) == SHORTEST_S
    turnover.ended(5.0)
    assert turnover.refused(6.0) == SHORTEST_S


@pytest.mark.parametrize("interval_s", [2.0, 5.0])
def test_each_further_caller_waits_one_more_interval(interval_s: float) -> None:
    turnover, now = paced(interval_s)
    assert [turnover.refused(now) for _ in range(3)] == pytest.approx([interval_s, 2 * interval_s, 3 * interval_s])
    turnover.ended(now + interval_s)
    assert turnover.refused(now + interval_s) == pytest.approx(interval_s)


def test_an_end_that_is_overdue_slows_the_pace_and_the_wait_is_bounded() -> None:
    turnover, now = paced(2.0)
    assert turnover.refused(now + 9.0) == 9.0
    assert turnover.refused(now + 1000.0) == LONGEST_S
    assert bounded(0.1) == SHORTEST_S


def test_the_pace_follows_what_happened_last() -> None:
    turnover, now = paced(10.0)
    for number in range(40):
        turnover.ended(now + number * 2.0)
    assert turnover.refused(now + 39 * 2.0) == pytest.approx(2.0, rel=0.01)

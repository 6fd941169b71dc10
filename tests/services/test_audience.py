"""Readers come and go; a request nobody reads is given up after the grace time, and not before."""

import asyncio

import pytest

from services.coordinator.audience import Audience


def watched(grace_s: float) -> tuple[Audience, list[str]]:
    abandoned: list[str] = []
    return Audience(grace_s=grace_s, on_abandoned=abandoned.append), abandoned


class GoneError(Exception):
    """A client that hung up."""


def visit(audience: Audience, request_id: str = "chat") -> None:
    with pytest.raises(GoneError), audience.reading(request_id):
        raise GoneError


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_request_that_lost_its_reader_is_abandoned_after_the_grace_time():
    audience, abandoned = watched(0.02)
    visit(audience)
    assert abandoned == []
    await until(lambda: abandoned == ["chat"])
    audience.check()


async def test_a_reader_that_comes_back_stops_the_clock():
    audience, abandoned = watched(0.02)
    visit(audience)
    with audience.reading("chat"):
        await asyncio.sleep(0.06)
        assert abandoned == []
    await asyncio.sleep(0.06)
    assert abandoned == [], "it was read to its end"


async def test_one_reader_of_two_leaving_is_no_reason_to_stop():
    audience, abandoned = watched(0.02)
    with audience.reading("chat"):
        visit(audience)
        await asyncio.sleep(0.06)
    assert abandoned == []


async def test_requests_are_watched_apart_and_closing_abandons_nothing():
    audience, abandoned = watched(0.02)
    visit(audience, "a")
    with audience.reading("b"):
        await until(lambda: abandoned == ["a"])
    visit(audience, "c")
    audience.close()
    await asyncio.sleep(0.06)
    assert abandoned == ["a"]


async def test_a_request_that_is_to_be_read_has_its_grace_time_or_a_longer_one_to_be_found_in():
    audience, abandoned = watched(0.02)
    audience.expect("new")
    audience.expect("adopted", at_least_s=600.0)
    with audience.reading("read"):
        audience.expect("read")
        await until(lambda: abandoned == ["new"])
        await asyncio.sleep(0.06)
        assert abandoned == ["new"]
    audience.close()

"""Scaling policies: what the accounts say becomes a number, within the bounds and delays that Serve itself keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from redis.exceptions import ConnectionError as RedisConnectionError

from services.accounts import Account, AccountBook
from services.scaling import ByDrafts, ByQueuedRows, LevelsReader, levels

NOW = 1_000.0


def account(kind: str, id: str, *, at: float = NOW, **numbers: dict[str, float]) -> Account:
    return Account(kind=kind, id=id, model="m", at=at, **numbers)  # type: ignore[arg-type]


SERVICE = (
    account(
        "coordinator", "a", counters={"accepted": 60, "drafted": 100}, gauges={"waiting_tokens": 700, "max_batch": 8}
    ),
    account("coordinator", "b", counters={"accepted": 10, "drafted": 60}, gauges={"requests_live": 4, "max_batch": 8}),
    account("coordinator", "gone", at=NOW - 60, counters={"drafted": 40}, gauges={"waiting_tokens": 9_000}),
    account("target", "t", gauges={"sequences": 3}),
    account("target", "t.1", gauges={"pages": 3}),
    account("proposer", "p", gauges={"queue_age_seconds": 0.02}),
    account("proposer", "q", gauges={"queue_age_seconds": 0.3}),
)


def context(number: int, **told: float) -> Any:
    return SimpleNamespace(
        target_num_replicas=number, aggregated_metrics={key: {"r": value} for key, value in told.items()}
    )


def test_levels_are_those_of_whoever_lives_and_drafts_those_since_the_last_look() -> None:
    found = levels(SERVICE, since=(50, 150), now=NOW)
    assert (found.queued_rows, found.busy, found.groups, found.queue_age_s) == (700, 0.25, 1, 0.3)
    assert found.acceptance == pytest.approx(20 / 50)
    assert levels(SERVICE, since=(70, 200), now=NOW).acceptance is None, "no draft since"
    assert "acceptance" not in levels(SERVICE, since=(70, 200), now=NOW).metrics()


@pytest.mark.parametrize(
    ("number", "told", "wanted"),
    [
        (1, {"queued_rows": 150, "busy": 1.0}, 2),
        (2, {"queued_rows": 150, "busy": 1.0}, 2),
        (2, {"queued_rows": 0, "busy": 0.3}, 1),
        (2, {"queued_rows": 0, "busy": 0.5}, 2),
        (2, {"queued_rows": 1, "busy": 0.0}, 2),
        (1, {"queued_rows": 0, "busy": 0.0}, 0),
        (3, {}, 3),
    ],
    ids=[
        "they wait",
        "few wait",
        "the other has room",
        "it has not",
        "one waits",
        "nobody is there",
        "nothing is known",
    ],
)
def test_targets_follow_the_rows_that_wait(number: int, told: dict[str, float], wanted: int) -> None:
    assert ByQueuedRows(rows_each=100, full=0.7)(context(number, **told))[0] == wanted


@pytest.mark.parametrize(
    ("number", "told", "wanted"),
    [
        (1, {"queue_age_s": 0.2, "groups": 2, "acceptance": 0.6}, 2),
        (2, {"queue_age_s": 0.2, "groups": 1, "acceptance": 0.6}, 2),
        (2, {"queue_age_s": 0.02, "groups": 2, "acceptance": 0.6}, 2),
        (2, {"queue_age_s": 0.001, "groups": 2, "acceptance": 0.6}, 1),
        (2, {"queue_age_s": 0.2, "groups": 2, "acceptance": 0.1}, 1),
        (1, {"queue_age_s": 0.2, "groups": 2}, 2),
        (3, {}, 3),
    ],
    ids=["rows wait", "one a group and a spare", "enough", "too many", "drafts earn nothing", "no drafts", "unknown"],
)
def test_proposers_follow_their_queue_and_what_drafts_earn(number: int, told: dict[str, float], wanted: int) -> None:
    assert ByDrafts(age_s=0.05, worth=0.2)(context(number, **told))[0] == wanted


async def test_while_nothing_is_known_nothing_is_told() -> None:
    class Away:
        async def hgetall(self, key: str) -> dict[bytes, bytes]:
            raise RedisConnectionError("away")

    assert await LevelsReader(AccountBook(Away())).read() == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [ByQueuedRows, ByDrafts])
def test_serve_takes_the_policy_by_its_name_and_waits_as_it_is_told(policy: type) -> None:
    """Serve's own code, from the name in a configuration to a number, before it applies the bounds."""
    from ray.serve._private.autoscaling_state import _resolve_policy_callable
    from ray.serve.autoscaling_policy import _apply_autoscaling_config

    named = AutoscalingPolicy(policy_function=f"services.scaling:{policy.__name__}")
    bounds: dict[str, Any] = {"min_replicas": 1, "max_replicas": 9, "policy": named}
    config = AutoscalingConfig(**bounds, upscale_delay_s=0, downscale_delay_s=0)
    patient = AutoscalingConfig(**bounds, upscale_delay_s=60, downscale_delay_s=60)
    decide = _apply_autoscaling_config(_resolve_policy_callable(named))

    def decided(number: int, config: AutoscalingConfig = config, **told: float) -> int:
        asked = context(number, **told)
        more = {
            "current_num_replicas": number,
            "config": config,
            "policy_state": {},
            "capacity_adjusted_min_replicas": 1,
            "capacity_adjusted_max_replicas": 9,
            "current_time": NOW,
            "total_num_requests": 0,
        }
        return decide(SimpleNamespace(**vars(asked), **more))[0]  # type: ignore[arg-type]

    assert decided(2, queued_rows=10**6, busy=1.0, queue_age_s=9.0, groups=8) == 3
    assert decided(2, patient, queued_rows=10**6, busy=1.0, queue_age_s=9.0, groups=8) == 2
    assert decided(2, queued_rows=0, busy=0.0, queue_age_s=0.0, groups=1) == 1
    assert decided(2, patient, queued_rows=0, busy=0.0, queue_age_s=0.0, groups=1) == 2
    assert decided(2) == 2

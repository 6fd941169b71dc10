"""How many users a load shape wants at a time; None ends the run. Times in seconds from its start."""

from __future__ import annotations


def steps_level(run_time: float, step_time: float, max_users: int) -> int | None:
    """1, 2, 4 … up to `max_users`, each for `step_time`."""
    levels = [1]
    while levels[-1] < max_users:
        levels.append(min(levels[-1] * 2, max_users))
    step = int(run_time // step_time)
    return levels[step] if step < len(levels) else None


def ramp_level(run_time: float, step_time: float, max_users: int) -> int | None:
    """1, 2, 3 … up to `max_users`, each for `step_time`."""
    users = int(run_time // step_time) + 1
    return users if users <= max_users else None


def spike_level(run_time: float, step_time: float, max_users: int) -> int | None:
    """A tenth of `max_users`, then all, then a tenth, each for `step_time`."""
    calm = max(1, max_users // 10)
    step = int(run_time // step_time)
    return (calm, max_users, calm)[step] if step < 3 else None


SOAK_STEPS = 60


def soak_level(run_time: float, step_time: float, max_users: int) -> int | None:
    """`max_users` for `SOAK_STEPS` times `step_time`."""
    return max_users if run_time < SOAK_STEPS * step_time else None

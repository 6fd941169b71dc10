"""Hypothesis for every test: the same examples in each run, and no clock in the verdict.

`pytest --hypothesis-profile=default` looks for new examples instead.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

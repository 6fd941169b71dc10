"""Hypothesis for every test: the same examples in each run, and no clock in the verdict.

`pytest --hypothesis-profile=default` looks for new examples instead.

And under `nohup`, which has hang-ups ignored: the tests still ignore them, but what they start hears them.
"""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # a handler is not inherited; being ignored is

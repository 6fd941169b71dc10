"""A spike: a tenth of `--users`, then all of them at once, then a tenth again, `--step-time` seconds each."""

from __future__ import annotations

import time

from locust import LoadTestShape

from loadtest.levels import spike_level


class Spike(LoadTestShape):
    """Calm, spike, calm. The report says how long the service needed to be as before (`loadtest/recovery.py`)."""

    use_common_options = True

    def __init__(self):
        super().__init__()
        self.level = 0
        self.changes = []  # Unix times at which it changed

    def tick(self):
        options = self.runner.environment.parsed_options
        most = options.num_users or 10
        users = spike_level(self.get_run_time(), options.step_time, most)
        if users is None:
            return None
        if users != self.level:
            self.level = users
            self.changes.append(time.time())
        return users, most  # all of them at once, both ways

    def spike(self):
        """Unix times of its begin and end; None before the end."""
        return tuple(self.changes[1:3]) if len(self.changes) == 3 else None

"""A straight ramp: from 1 user to `--users` over `--step-time` seconds times that number. Add this file to `-f`."""

from __future__ import annotations

from locust import LoadTestShape

from loadtest.levels import ramp_level


class Ramp(LoadTestShape):
    """Adds one user every `--step-time` seconds up to `--users`, then stops."""

    use_common_options = True

    def tick(self):
        options = self.runner.environment.parsed_options
        users = ramp_level(self.get_run_time(), options.step_time, options.num_users or 8)
        return None if users is None else (users, 1)

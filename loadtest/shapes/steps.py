"""A concurrency sweep: 1, 2, 4 … users, each level for the same time. Add this file to `-f` to use it."""

from __future__ import annotations

from locust import LoadTestShape

from loadtest.levels import steps_level


class Steps(LoadTestShape):
    """Doubles the users from 1 to `--users`, `--step-time` seconds at each level, then stops."""

    use_common_options = True

    def tick(self):
        options = self.runner.environment.parsed_options
        users = steps_level(self.get_run_time(), options.step_time, options.num_users or 8)
        return None if users is None else (users, users)

"""A soak: `--users` for sixty times `--step-time` (20 minutes by default). The timeline shows what drifts."""

from __future__ import annotations

from locust import LoadTestShape

from loadtest.levels import soak_level


class Soak(LoadTestShape):
    """The same load for a long time."""

    use_common_options = True

    def tick(self):
        options = self.runner.environment.parsed_options
        users = soak_level(self.get_run_time(), options.step_time, options.num_users or 4)
        return None if users is None else (users, users)

"""A spike: a tenth of `--users`, then all of them at once, then a tenth again, `--step-time` seconds each."""

from __future__ import annotations

from locust import LoadTestShape

from loadtest.levels import spike_level


class Spike(LoadTestShape):
    """Calm, spike, calm: the timeline shows how long the service needs to recover."""

    use_common_options = True

    def tick(self):
        options = self.runner.environment.parsed_options
        users = spike_level(self.get_run_time(), options.step_time, options.num_users or 10)
        return None if users is None else (users, users)

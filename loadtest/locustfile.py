"""Locust users that stream: `locust -f loadtest/locustfile.py --host http://127.0.0.1:8000`, alone or distributed.

TTFT needs `readline(b"\\n\\n")` on the raw stream: `iter_lines` waits for a full block. `loadtest.run` (`make load`)
calls this headless. Nothing here imports the server.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from locust import FastHttpUser, events, task
from locust.runners import WorkerRunner

from loadtest.answer import Answer, StreamFault
from loadtest.arrivals import PoissonArrivals
from loadtest.options import add_options, request_body, settings_of
from loadtest.prompts import Prompt, endless, read_prompts
from loadtest.report import goodput_ratio, result_of, text_of
from loadtest.slo import Objectives
from loadtest.totals import Totals

MESSAGE_KEY = "seqmtp_totals"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

totals = Totals()  # this process's; the master's also has what workers reported
reporters: set[str] = set()  # workers the master heard of
user_numbers = itertools.count()


@events.init_command_line_parser.add_listener
def on_parser(parser):
    add_options(parser)


@events.report_to_master.add_listener
def on_report(client_id, data):
    """Worker: hand over what was counted since the last report."""
    global totals
    data[MESSAGE_KEY], totals = totals.to_message(), Totals()


@events.worker_report.add_listener
def on_worker_report(client_id, data):
    """Master: add it up."""
    reporters.add(client_id)
    totals.merge(Totals.from_message(data[MESSAGE_KEY]))


@events.test_start.add_listener
def on_start(environment):
    global totals
    if not isinstance(environment.runner, WorkerRunner):
        totals = Totals()


@events.quitting.add_listener
def on_quitting(environment):
    """Print the summary, write the JSON, and set the exit code: 1 if requests failed or too few answers were good."""
    runner, options = environment.runner, environment.parsed_options
    if runner is None or isinstance(runner, WorkerRunner):
        return
    runner.stop()  # after an interrupt the workers have not reported yet
    spike = getattr(environment.shape_class, "spike", lambda: None)()
    result = result_of(totals, settings_of(options, environment.host, max(len(reporters), 1)), spike)
    print(text_of(result), file=sys.stderr)
    if options.result_file:
        Path(options.result_file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    is_good = totals.num_failed == 0 and totals.overall.num_answers > 0
    environment.process_exit_code = 0 if is_good and goodput_ratio(totals) >= options.min_goodput else 1


class StreamingUser(FastHttpUser):
    """Holds one conversation after another and measures each answer as it streams in."""

    connection_timeout = 30.0
    network_timeout = 300.0

    def on_start(self):
        options = self.environment.parsed_options
        worker = getattr(self.environment.runner, "worker_index", 0)
        self.draws = random.Random(f"{options.load_seed} {worker} {next(user_numbers)}")
        prompts = read_prompts(Path(options.dataset), options.prompt_chars)
        self.prompts = endless(prompts, self.draws.getrandbits(32))
        self.objectives = Objectives.parse(options.slo)
        self.model = options.model or self._first_model()
        self.arrivals = None
        if options.rate:
            rate = options.rate / max(options.num_users or 1, 1)
            self.arrivals = PoissonArrivals(rate, self.draws, time.monotonic())

    def wait_time(self):
        """Nothing for a closed loop; the time to the next due request at a Poisson rate."""
        if self.arrivals is None:
            return 0.0
        wait, late = self.arrivals.next_wait(time.monotonic())
        totals.add_lag(late * 1e3)
        return wait

    @task
    def converse(self):
        """Ask the turns of one prompt, each after the answer to the one before."""
        options = self.environment.parsed_options
        prompt: Prompt = next(self.prompts)
        messages: list[dict[str, str]] = []
        for turn in prompt.turns[: options.turns]:
            messages.append({"role": "user", "content": turn})
            answer = self.ask(request_body(options, self.model, messages), prompt.category)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer.text})

    def ask(self, body: dict, category: str) -> Answer | None:
        """One streamed request, counted; None when it failed. Locust's own row for the POST times the headers only."""
        path = PATHS[self.environment.parsed_options.endpoint]
        started, clock = time.time(), time.perf_counter()
        answer = Answer()
        with self.client.post(path, json=body, stream=True, catch_response=True, name=f"{path} (headers)") as response:
            try:
                if response.status_code != 200:
                    raise StreamFault(f"status {response.status_code}: {(response.text or '')[:200]}")
                self._read(response.stream, answer, clock)
                answer.check()
            except (StreamFault, OSError) as error:
                response.failure(error)
                totals.add_failure(started, time.time())
                return None
            response.success()
        totals.add(answer, category, started, time.time(), self.objectives)
        self._show(answer)
        return answer

    def _read(self, stream, answer: Answer, clock: float) -> None:
        while event := stream.readline(b"\n\n"):
            if not answer.feed(event, (time.perf_counter() - clock) * 1e3):
                return

    def _show(self, answer: Answer) -> None:
        """Rows for Locust's own tables and charts; ICL as one mean per answer, not an event per chunk."""
        gaps = answer.icl_ms
        rows = {
            "ttft": answer.ttft_ms,
            "tpot": answer.tpot_ms,
            "icl (mean of answer)": sum(gaps) / len(gaps) if gaps else None,
            "e2e": answer.e2e_ms,
        }
        for name, value in rows.items():
            if value is not None:
                self.environment.events.request.fire(
                    request_type="LLM",
                    name=name,
                    response_time=value,
                    response_length=answer.num_tokens,
                    exception=None,
                    context={},
                )

    def _first_model(self) -> str:
        with self.client.get("/v1/models", catch_response=True, name="/v1/models") as response:
            try:
                return str(response.json()["data"][0]["id"])
            except (KeyError, IndexError, TypeError, ValueError):
                response.failure("no model is listed; name one with --model")
                return ""

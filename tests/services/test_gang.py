"""A target group of two rank processes serves a checkpoint of the DeepSeek-V3 layout, over HTTP, with speculation.

Each text is compared with that of the same request decoded plainly, at depth 0, in one process that holds all experts.
"""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from seqmtp_serve.config import EngineConfig, SchedulerConfig
from seqmtp_serve.local import LocalService
from seqmtp_serve.model.synthetic import TINY_V3
from seqmtp_serve.request import Request, SamplingParams
from tests.services.launched import complete, serving, stream, workers
from tests.unit.released_files import write_tiny_v3

pytestmark = pytest.mark.slow
RANK = "services.target.rank"
NUM_TOKENS = 300
# Two at a time, so that both ranks hold a request; each is long enough to be under way when a rank is lost.
PROMPTS = ([5, 9, 3], list(range(2, 60)))
FLAGS = ("--no-ray", "--target-ranks", "2", "--weights", "fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(TINY_V3, max_position=4096)
    return write_tiny_v3(tmp_path_factory.mktemp("model") / "tiny-v3", config, context=1.0, noise=0.3).folder


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    with serving(model, tmp_path_factory.mktemp("service") / "data", *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
async def expected(model: Path) -> list[list[int]]:
    """The tokens of each prompt from one process, without drafts."""
    engine = EngineConfig(weights="fp32", max_model_len=512, num_pages=8, max_batch=1)
    one = SchedulerConfig(max_batch=1)
    async with LocalService.open(str(model), decoder=lambda *_: lambda _: "", engine=engine, scheduler=one) as service:
        return [[token for row in await service.generate(plain(prompt)) for token in row.tokens] for prompt in PROMPTS]


def plain(prompt: list[int]) -> Request:
    params = SamplingParams(temperature=0.8, seed=11, seeded=True, max_tokens=NUM_TOKENS, ignore_eos=True, max_depth=0)
    return Request(request_id=f"plain-{len(prompt)}", prompt_ids=tuple(prompt), params=params)


def body(prompt: list[int]) -> Mapping[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0.8,
        "seed": 11,
        "ignore_eos": True,
    }


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "{" in line}


def tokens_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"w(\d+)", text)]


@pytest.mark.covers(99, 100, 101, 157)
def test_two_ranks_speculate_and_have_the_text_of_one_process(
    service: tuple[str, psutil.Process], expected: list[list[int]]
):
    url, launcher = service
    assert len(workers(launcher, RANK)) == 1
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(url, body(prompt)), PROMPTS))
    assert [tokens_of(answer["choices"][0]["text"]) for answer in answers] == expected
    for answer in answers:
        assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    counted = metrics(url)
    for rank in (0, 1):
        assert counted[f"seqmtp_experts_verify_rank{rank}_touched_total"] > 0
        assert counted[f"seqmtp_experts_verify_rank{rank}_sent_bytes_total"] > 0
    assert counted["seqmtp_experts_mtp_touched_total"] > 0
    for kernel in ("attention_paged", "experts_torch", "dispatch_all_to_all_gloo"):
        assert counted[f"seqmtp_target_kernel_{kernel}"] == 1
    for kernel in ("attention_paged", "experts_torch", "dispatch_local"):
        assert counted[f"seqmtp_proposer_kernel_{kernel}"] == 1


@pytest.mark.covers(88)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_costs_no_token(
    service: tuple[str, psutil.Process], expected: list[list[int]], number: signal.Signals
):
    url, launcher = service
    (lost,) = workers(launcher, RANK)
    leader = psutil.Process(lost).ppid()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        beside = pool.submit(stream, url, body(PROMPTS[1]))
        first = stream(url, body(PROMPTS[0]), lambda: os.kill(lost, number))
        texts = [first, beside.result()]
    assert [tokens_of(text) for text in texts] == expected
    assert not psutil.pid_exists(lost), "the stopped rank was ended"
    (now,) = workers(launcher, RANK)
    assert now != lost
    assert psutil.Process(now).ppid() != leader, "the whole gang is new"


def test_on_ray_a_stopped_rank_is_ended_and_costs_no_token(model: Path, expected: list[list[int]], tmp_path: Path):
    with serving(model, tmp_path / "data", *FLAGS[1:]) as (url, launcher):
        (lost,) = workers(launcher, "RankActor")
        text = stream(url, body(PROMPTS[0]), lambda: os.kill(lost, signal.SIGSTOP))
        assert tokens_of(text) == expected[0]
        assert not psutil.pid_exists(lost)
        assert len(workers(launcher, "RankActor")) == 1

"""One scrape of any gateway shows the whole service, and its numbers are those that clients were told and saw."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.accounts import Account, AccountBook
from services.gateway.app import create_app
from services.gateway.directory import RegistryDirectory
from services.gateway.grpc_coordinators import GrpcCoordinators
from services.gateway.metric_words import COORDINATOR, COORDINATOR_GAUGES, PROPOSER, PROPOSER_GAUGES, TARGET, help_of
from services.settings import Settings
from services.store.connection import connect
from services.store.embedded import EmbeddedValkey
from tests.patience import PATIENCE_S
from tests.services.coordinators import Node, nodes
from tests.services.gateway.world import TEXT, streamed

Samples = dict[str, float]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@contextlib.asynccontextmanager
async def gateway(valkey: EmbeddedValkey) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway over the coordinators in the registry, its account kept."""
    redis = connect(valkey.url, socket_timeout_s=PATIENCE_S)
    app = create_app(Settings(), GrpcCoordinators(RegistryDirectory(redis)), TEXT, AccountBook(redis))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://g") as client:
        yield client


async def totals(client: httpx.AsyncClient) -> Samples:
    """Every sample of a scrape, added up over its labels."""
    found: Samples = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            key = sample.name + "".join(
                f" {sample.labels[name]}" for name in ("position", "le") if name in sample.labels
            )
            found[key] = found.get(key, 0.0) + sample.value
    return found


async def totals_once(client: httpx.AsyncClient, name: str, value: float, **levels: float) -> Samples:
    """A scrape in which this sum has come to that, and levels too: readings are shared for a moment, accounts for a
    second, and a request is let go of a moment after its last row.
    """
    wanted = {name: value, **levels}
    async with asyncio.timeout(60):
        while (found := await totals(client)) | wanted != found:
            await asyncio.sleep(0.02)
    return found


async def answers(client: httpx.AsyncClient, number: int) -> list[dict[str, Any]]:
    """What clients were told at the end of `number` streams, and the chunks with text that they saw."""
    told = []
    for each in range(number):
        fields = {"max_tokens": 20 + each, "ignore_eos": True, "stream_options": {"include_usage": True}}
        fields["speculation"] = {"trace": True}  # then a row without text is a chunk too
        messages = [{"role": "user", "content": f"question {each}"}]
        events = [data for _, data in await streamed(client, messages=messages, **fields) if data != "[DONE]"]
        rows = [one for one in events if one["choices"] and one["choices"][0]["delta"].get("role") is None]
        told.append({**events[-1], "chunks": sum(not one["choices"][0]["finish_reason"] for one in rows)})
    return told


async def write_accounts(*coordinators: Node) -> None:
    for node in coordinators:
        await AccountBook(node.registry.redis).write(node.servicer.account(None))


@pytest.mark.covers(104, 109, 110)
async def test_requests_chunks_and_metrics_tell_the_same(valkey: EmbeddedValkey) -> None:
    async with nodes(valkey, "a", "b", delay_s=0.0) as (a, b), gateway(valkey) as client:
        told = await answers(client, 5)
        spec = [one["metrics"]["speculative_decoding"] for one in told]
        tokens = sum(one["usage"]["completion_tokens"] for one in told)
        idle = {"seqmtp_requests_live": 0.0, "seqmtp_readers": 0.0, "seqmtp_pages_free": 2 * 4096.0}
        found = await totals_once(client, "seqmtp_outputs_total", tokens, **idle)
        drafts = sum(one["num_spec_steps"] for one in spec)
        assert found["vllm:spec_decode_num_drafts_total"] == drafts > 0
        assert found["vllm:spec_decode_num_draft_tokens_total"] == sum(one["num_draft_tokens"] for one in spec)
        accepted = sum(one["num_accepted_draft_tokens"] for one in spec)
        assert found["vllm:spec_decode_num_accepted_tokens_total"] == accepted
        for position in range(3):
            per_position = sum(sum(one["acceptance_histogram"][position + 1 :]) for one in spec)
            assert found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total {position}"] == per_position
        assert found["vllm:generation_tokens_total"] == found["seqmtp_outputs_total"] == tokens
        assert found["seqmtp_bootstraps_total"] == found["vllm:request_success_total"] == 5
        assert tokens == found["seqmtp_bootstraps_total"] + found["seqmtp_progress_delivered_total"]
        assert found["seqmtp_rounds_total"] == drafts + found["seqmtp_rounds_plain_total"]
        # one chunk a committed row: E[R] as a client sees it is that of the ledger
        assert sum(one["chunks"] for one in told) == 5 + found["seqmtp_rounds_total"]
        assert found["seqmtp_progress_verified_total"] == accepted + found["seqmtp_rounds_total"]
        assert found["seqmtp_commit_seconds_count"] == found["seqmtp_commit_seconds_bucket +Inf"] > 0
        assert found["seqmtp_pages"] == found["seqmtp_pages_free"]

        await write_accounts(a, b)
        await a.kill()
        await a.forgotten()
        async with gateway(valkey) as other:  # a new one: it has read no account yet
            again = await totals(other)
            for name in ("seqmtp_outputs_total", "vllm:spec_decode_num_drafts_total", "seqmtp_commit_seconds_count"):
                assert again[name] == found[name], "what a lost coordinator counted stays"
            assert again["seqmtp_pages"] == 4096, "its levels do not"
            assert (await answers(other, 1))[0]["usage"]["completion_tokens"] == 20
            await totals_once(other, "seqmtp_outputs_total", tokens + 20)
        # the other's account was written at its end
        await totals_once(client, "vllm:generation_tokens_total", tokens + 20)


async def test_workers_accounts_are_shown_while_they_live_and_counted_for_a_day(valkey: EmbeddedValkey) -> None:
    redis = connect(valkey.url, socket_timeout_s=PATIENCE_S)
    await redis.flushall()
    book = AccountBook(redis)
    now = time.time()
    target = Account(kind="target", id="t", model="m", counters={"steps": 7.0}, gauges={"kv_bytes": 64.0})
    gone = Account(kind="target", id="gone", model="m", at=now - 60, counters={"steps": 5.0}, gauges={"kv_bytes": 32.0})
    forgotten = Account(kind="target", id="old", model="m", at=now - 2 * 86400, counters={"steps": 100.0})
    proposer = Account(kind="proposer", id="p", model="m", counters={"drafts": 3.0}, gauges={"mtp_kv_bytes": 8.0})
    for account in (target, gone, forgotten, proposer):
        await book.write(account)
    async with gateway(valkey) as client:
        text = (await client.get("/metrics")).text
        found = await totals(client)
    assert found["seqmtp_target_steps_total"] == 12
    assert found["seqmtp_target_kv_bytes"] == 64
    assert (found["seqmtp_proposer_drafts_total"], found["seqmtp_proposer_mtp_kv_bytes"]) == (3, 8)
    assert 'seqmtp_proposer_drafts_total{model_name="m",proposer="p"} 3.0' in text
    assert await redis.hexists("seqmtp:accounts", "old") == 0  # type: ignore[misc]
    await redis.aclose()


async def test_without_a_store_a_gateway_still_shows_its_own() -> None:
    redis = connect("redis://127.0.0.1:1")
    app = create_app(Settings(), GrpcCoordinators(RegistryDirectory(redis)), TEXT, AccountBook(redis))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client,
    ):
        assert (await totals(client))["seqmtp_open_requests"] == 0


async def test_a_coordinator_that_stops_answering_does_not_fall_back_to_an_older_account(
    valkey: EmbeddedValkey,
) -> None:
    """Its account is a second old, at best: a rate would take the step down for a restart."""
    async with nodes(valkey, "a", delay_s=0.0) as (a,), gateway(valkey) as client:
        await answers(client, 1)
        await write_accounts(a)
        await answers(client, 1)
        found = await totals_once(client, "seqmtp_outputs_total", 40)
        await a.kill()
        await a.forgotten()
        async with asyncio.timeout(60):
            while "seqmtp_pages" in (later := await totals(client)):  # until it is known to be gone
                await asyncio.sleep(0.02)
        for name in ("seqmtp_outputs_total", "seqmtp_rounds_total", "seqmtp_commit_seconds_count"):
            assert later[name] == found[name]


def test_every_key_that_is_counted_is_described() -> None:
    for table in (COORDINATOR, COORDINATOR_GAUGES, TARGET, PROPOSER, PROPOSER_GAUGES):
        assert all(text.endswith(".") for text in table.values())
    assert help_of("experts.verify.rank3.sent_bytes", COORDINATOR).startswith("Bytes sent")
    assert help_of("never heard of", COORDINATOR) == "Counter 'never heard of'."

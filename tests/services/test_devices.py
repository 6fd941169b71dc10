"""From the setting to each process' device: defaults, ranks, groups, Ray's resources, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.errors import InvalidField
from seqmtp_serve.ports import FeedRows
from seqmtp_serve.request import Ref
from services import serve
from services.app import application
from services.cli import main as seqmtp
from services.core_config import engine_config, proposer_config
from services.rpc.wire import proposer
from services.settings import Settings
from services.target import leader, process_group
from services.target.proposer_link import _frames, _on_host
from services.target.rank_spec import on_device_of
from services.target.worker import group_library
from tests.services.parsed import parse
from tests.unit.devices import HAS_CUDA
from tests.unit.pretend_device import pretending
from tests.unit.released_files import write_tiny_v3

# ---- settings


def test_the_device_is_named_by_flag_variable_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("engine: {device: 'cuda:2'}\n")
    assert parse().engine.device == "cpu"
    assert parse("--config", str(file)).engine.device == "cuda:2"
    monkeypatch.setenv("SEQMTP_ENGINE__DEVICE", "cuda:1")
    assert parse("--config", str(file)).engine.device == "cuda:1"
    assert parse("--device", "cuda").engine.device == "cuda"
    with pytest.raises(InvalidField, match=r"engine\.device"):
        parse("--device", "gpu")


def test_a_gpu_brings_its_own_defaults_and_takes_no_others() -> None:
    settings = parse("--device", "cuda")
    assert (settings.engine.weights, settings.engine.numerics) == ("bf16", "fast")
    assert engine_config(settings).device == proposer_config(settings).device == "cuda"
    assert (parse("v3-tiny").engine.weights, parse("v3-tiny", "--device", "cuda").engine.weights) == ("fp32", "bf16")
    assert parse("--device", "cuda", "--weights", "fp32").engine.weights == "fp32"
    for wrong in (("--weights", "int8"), ("--numerics", "invariant")):
        with pytest.raises(InvalidField, match="on cuda set "):
            engine_config(parse("--device", "cuda", *wrong))


def test_a_proposer_may_have_a_device_of_its_own() -> None:
    settings = parse("--device", "cuda:0", "--proposer-device", "cuda:1")
    assert (engine_config(settings).device, proposer_config(settings).device) == ("cuda:0", "cuda:1")
    settings = parse("--device", "cuda", "--proposer-device", "cpu")
    assert (engine_config(settings).device, proposer_config(settings).device) == ("cuda", "cpu")


@pytest.mark.skipif(HAS_CUDA, reason="this machine has a CUDA device")
def test_serve_refuses_a_missing_device_before_it_starts_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        seqmtp(["serve", "--no-ray", "--device", "cuda"])
    assert done.value.code
    assert "device cuda: torch" in capsys.readouterr().err
    with pretending(count=1), pytest.raises(InvalidField, match="this process sees cuda:0 "):
        serve.check_devices(parse("--device", "cuda", "--proposer-device", "cuda:1"))


# ---- ranks


def test_each_rank_of_a_group_takes_the_device_of_its_place() -> None:
    settings = parse("--device", "cuda", "--target-ranks", "4", "--proposer-device", "cuda")
    own = [on_device_of(settings, rank) for rank in range(4)]
    assert [each.engine.device for each in own] == [f"cuda:{rank}" for rank in range(4)]
    assert [proposer_config(each).device for each in own] == [each.engine.device for each in own], "colocated ones"
    assert on_device_of(parse("--target-ranks", "4"), 3).engine.device == "cpu"
    with pytest.raises(InvalidField, match="say cuda, and each takes its own"):
        on_device_of(parse("--device", "cuda:1", "--target-ranks", "2"), 0)


async def test_a_leader_refuses_one_device_for_all_before_it_starts_a_rank(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny_v3(tmp_path / "v3").folder))

    def never(specs: Sequence[Any]) -> Any:
        raise AssertionError("it started ranks")

    with pytest.raises(InvalidField, match="say cuda"):
        settings = parse("--device", "cuda:0", "--target-ranks", "2")
        async with leader.open_gang(settings, checkpoint, None, "gang", never):  # type: ignore[arg-type]
            pass


def test_nccl_carries_what_lies_on_gpus_and_gloo_the_rest(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny_v3(tmp_path / "v3").folder))
    assert group_library(parse("--target-ranks", "2"), checkpoint) == "gloo"
    if dist.is_nccl_available():
        assert group_library(parse("--target-ranks", "2", "--device", "cuda"), checkpoint) == "nccl"
    with pytest.raises(InvalidField, match="rows lie on cuda, gloo carries cpu"):
        group_library(
            parse("--target-ranks", "2", "--device", "cuda", "--all2all-backend", "all-to-all-gloo"), checkpoint
        )


@pytest.mark.parametrize(
    ("library", "device", "bound"),
    [("nccl", torch.device("cuda", 1), torch.device("cuda", 1)), ("gloo", torch.device("cpu"), None)],
)
def test_a_group_is_told_its_device_and_never_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, library: str, device: torch.device, bound: torch.device | None
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **rest: told.update(rest, backend=backend))
    monkeypatch.setattr(process_group, "interface_of", lambda host: None)
    process_group.form(dist.HashStore(), 1, 2, "127.0.0.1", library, device)
    assert (told["backend"], told["device_id"]) == (library, bound)
    assert told["timeout"] == process_group.FORM_TIMEOUT


# ---- Ray


def deployments(settings: Settings) -> dict[str, Any]:
    found = application(settings)._bound_deployment
    return {each.name: each for each in (argument._bound_deployment for argument in found.init_args)}


def bundles(deployment: Any) -> list[dict[str, float]]:
    found: list[dict[str, float]] = deployment._replica_config.placement_group_bundles
    return found


def test_on_ray_whoever_computes_on_a_gpu_asks_for_one() -> None:
    group = deployments(parse("--device", "cuda", "--target-ranks", "2"))
    assert [bundle["GPU"] for bundle in bundles(group["Target"])] == [1, 1]
    assert group["Target"].ray_actor_options["num_gpus"] == group["Proposer"].ray_actor_options["num_gpus"] == 1
    assert "num_gpus" not in group["Coordinator"].ray_actor_options
    on_cpus = deployments(parse("--target-ranks", "2"))
    assert all("GPU" not in bundle for bundle in bundles(on_cpus["Target"]))
    assert "num_gpus" not in on_cpus["Proposer"].ray_actor_options


# ---- the wire


@pytest.mark.parametrize("with_scales", [False, True])
def test_hidden_rows_of_all_feeds_come_to_the_host_together(with_scales: bool) -> None:
    lens, rows = (3, 1, 4), torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(8, generator=torch.Generator().manual_seed(1))

    def feeds(device: str) -> list[FeedRows]:
        parts = zip(lens, rows.to(device).split(lens), scales.to(device).split(lens), strict=True)
        return [
            FeedRows(
                ref=Ref(request_id=f"r{place}", epoch=1, version=0, digest=b""),
                first_base=0,
                hidden=hidden,
                hidden_scales=scale if with_scales else None,
                next_ids=tuple(range(count)),
                depth=1,
            )
            for place, (count, hidden, scale) in enumerate(parts)
        ]

    def sent(own: list[FeedRows]) -> list[proposer.FeedFrame]:
        return list(_frames(_on_host(own), ()))

    with pretending() as traffic:
        frames = sent(feeds("cuda:0"))
    assert sum(traffic.to_host.values()) == 1 + with_scales
    assert frames == sent(feeds("cpu"))


# ---- the bench


def test_the_engine_bench_runs_on_a_pretended_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write_tiny_v3(tmp_path / "v3").folder)
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended")
    small = ["--rows", "1,3", "--depths", "0,2", "--steps", "2", "--repeats", "1", "--context", "20"]
    with pretending():
        args = ["bench", "engine", folder, "--device", "cuda", "--json", *small]
        with pytest.raises(SystemExit) as done:
            seqmtp(args)
    assert done.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["weights"], report["numerics"]) == ("cuda", "bf16", "fast")
    assert report["kernels"]["attention"] == "sdpa"
    assert report["kernels"]["experts"] == "torch-grouped"
    assert "Pretended" in report["machine"]

"""Runs of two processes over gloo, experts shared out: exact resume, a killed rank, errors that keep their type."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import RECIPE, log_of, longer, make_corpus, trainer_in

from seqmtp_serve.errors import BadCorpus, RankLost
from seqmtp_serve.training.joint.cli import begin
from seqmtp_serve.training.joint.export import trained_model
from seqmtp_serve.training.joint.launch import RankGroup, run_job
from seqmtp_serve.training.joint.run_files import latest, own_tensors, read_rank
from seqmtp_serve.training.joint.worker import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # processes start slowly on a busy machine


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def job(corpus: Path, folder: Path, until: int, *, save_every_s: float = 1e9) -> Job:
    return Job(corpus=str(corpus), folder=str(folder), ranks=2, until=until, save_every_s=save_every_s)


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six uninterrupted steps."""
    folder = tmp_path_factory.mktemp("whole")
    begin(folder, RECIPE)
    run_job(job(corpus, folder, 6))
    return folder


@pytest.mark.covers(42, 47, 101, 108)
def test_two_ranks_train_what_one_trains(corpus: Path, whole: Path, tmp_path: Path) -> None:
    """The same streams, the same sums up to the order of rounding; and the experts are really apart."""
    alone = trainer_in(tmp_path, corpus)
    lines = list(alone.run(save_every_s=1e9, until=6))
    for line, other in zip(lines, log_of(whole), strict=True):
        assert other["main"]["loss"] == pytest.approx(line["main"]["loss"], rel=1e-3)
        assert other["mtp"][1]["loss"] == pytest.approx(line["mtp"][1]["loss"], rel=1e-3)
        for name, norm in line["shared_gradients"].items():
            assert other["shared_gradients"][name] == pytest.approx(norm, rel=2e-2), name
        assert other["sent_bytes"] > 0
    assert log_of(whole)[0]["expert_load"] == lines[0]["expert_load"]
    held = [{name for name in read_rank(whole, 6, rank) if ".experts." in name} for rank in range(2)]
    assert all(held)
    assert not held[0] & held[1]
    _, model, found = trained_model(whole)
    assert found["ranks"] == 2
    ours = own_tensors(alone.model)
    for name, tensor in own_tensors(model).items():
        torch.testing.assert_close(tensor, ours[name], rtol=0.05, atol=0.01, msg=name)


def test_an_interrupted_run_of_two_is_the_uninterrupted_one_bit_for_bit(
    corpus: Path, whole: Path, tmp_path: Path
) -> None:
    begin(tmp_path, RECIPE)
    run_job(job(corpus, tmp_path, 3))
    run_job(job(corpus, tmp_path, 6))
    for rank in range(2):
        cut, uncut = read_rank(tmp_path, 6, rank), read_rank(whole, 6, rank)
        assert cut.keys() == uncut.keys()
        assert all(torch.equal(cut[name], uncut[name]) for name in cut)


def test_a_killed_rank_ends_the_run_and_leaves_its_last_step(corpus: Path, tmp_path: Path) -> None:
    begin(tmp_path, longer(RECIPE, 100_000))
    group = RankGroup(job(corpus, tmp_path, 100_000, save_every_s=0))
    try:
        while latest(tmp_path) is None:
            assert group.processes[0].poll() is None
            time.sleep(0.05)
        os.kill(group.processes[1].pid, signal.SIGKILL)
        with pytest.raises(RankLost, match=r"rank 1 ended with code -9; step \d+ is intact: start the run again"):
            group.wait()
    finally:
        group.stop()
    assert all(process.poll() is not None for process in group.processes)
    _, model, found = trained_model(tmp_path)  # both ranks' files of the step that is named, whole
    assert found["progress"]["step"] >= 1
    assert all(bool(tensor.isfinite().all()) for tensor in own_tensors(model).values())


def test_a_ranks_own_error_keeps_its_type(corpus: Path, tmp_path: Path) -> None:
    starved = replace(RECIPE, optimization=replace(RECIPE.optimization, streams_per_step=998))
    begin(tmp_path, starved)
    with pytest.raises(BadCorpus, match="a step reads 998"):
        run_job(job(corpus, tmp_path, 1))

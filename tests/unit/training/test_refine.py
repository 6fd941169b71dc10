"""The last phase: the MTP layer alone learns from the model's own text, and the run it leaves is like any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_joint_export import command
from tiny_run import RECIPE, make_corpus, trainer_in
from tiny_v3 import CONFIG

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.errors import CheckpointNotWritten, InvalidField, LossDiverged, TrainingError
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.training.joint import own_samples
from seqmtp_serve.training.joint import refine as refine_module
from seqmtp_serve.training.joint.corpus import Corpus, read_corpus
from seqmtp_serve.training.joint.export import export_run, trained_model
from seqmtp_serve.training.joint.own_samples import SamplePlan
from seqmtp_serve.training.joint.refine import RefinePlan, refine
from seqmtp_serve.training.joint.run_files import latest
from seqmtp_serve.training.mtp_objective import Wiring
from seqmtp_serve.training.shards import read_shard
from seqmtp_serve.training.trainer import FitSettings

ONE = replace(RECIPE, mtp=MtpConfig(fed_hidden="post", recycled_hidden="post"))
LAYER = f"model.layers.{CONFIG.num_layers}."
SHARED = tuple(LAYER + name for name in ("embed_tokens", "shared_head"))


def plan(**changes: Any) -> RefinePlan:
    samples = SamplePlan(tokens=600, seed=1, prompt_lens=(3, 6), reply_len=10, batch=30)
    fit = FitSettings(steps=8, seed=1, lr=1e-2, warmup_steps=2, batch_rows=150, num_chains=4, compute_dtype="float32")
    return RefinePlan(samples=samples, fit=replace(fit, **changes))


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def corpus(corpus_folder: Path) -> Corpus:
    return read_corpus(corpus_folder, "train", CONFIG.vocab_size)


@pytest.fixture(scope="module")
def run(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for _ in trainer_in(folder, corpus_folder, ONE).run(save_every_s=1e9, until=20):
        pass
    return folder


@pytest.fixture(scope="module")
def refined(run: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refined")
    refine(run, corpus, folder, plan(steps=40))
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(trained_model(folder)[1].state_dict())


@pytest.mark.covers(28, 37, 44)
def test_only_the_mtp_layers_own_tensors_change(run: Path, refined: Path) -> None:
    before, after = tensors_of(run), tensors_of(refined)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith(LAYER) and not name.startswith(SHARED) for name in changed)
    own = [name for name in before if name.startswith(LAYER) and not name.startswith(SHARED)]
    trained = {name for name in own if not name.endswith("e_score_correction_bias")}
    assert {name for name in trained if ".experts." not in name} <= changed


def test_it_learns_at_every_depth_on_its_own_text(refined: Path) -> None:
    lines = [json.loads(line) for line in (refined / "refine/fit/log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 40
    for depth in range(3):
        assert sum(line[depth] for line in losses[-8:]) < 0.8 * sum(line[depth] for line in losses[:8])


def test_the_samples_are_the_models_own_text(run: Path, refined: Path) -> None:
    """A greedy row's next token is the model's first choice; the hot share is what was asked."""
    _, model, _ = trained_model(run)
    paths = sorted((refined / "refine/samples").glob("*.safetensors"))
    assert len(paths) == 2
    documents = [document for path in paths for document in read_shard(path)]
    assert sum(not document.greedy for document in documents) == 18
    agreed = []
    with torch.no_grad():
        for document in documents:
            if document.greedy:
                rows = model.logits(document.hidden[document.prompt_len - 1 : -1].float())
                agreed += (rows.argmax(-1) == document.tokens[document.prompt_len :]).tolist()
    assert sum(agreed) > 0.95 * len(agreed)  # states are kept in bf16


def test_an_interrupted_phase_is_the_uninterrupted_one(
    run: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while it samples, and again while it trains."""
    whole = plan(steps=6)
    refine(run, corpus, tmp_path / "whole", whole)
    batches = iter([True, False])

    def one_batch(*args: Any) -> Any:
        if not next(batches):
            raise KeyboardInterrupt
        return batch(*args)

    batch = own_samples._batch
    monkeypatch.setattr(own_samples, "_batch", one_batch)
    with pytest.raises(KeyboardInterrupt):
        refine(run, corpus, tmp_path / "parts", whole)
    monkeypatch.setattr(own_samples, "_batch", batch)
    step, seen = refine_module.Trainer.train_step, iter(range(100))

    def three_steps(self: Any, batch: Any) -> Any:
        if next(seen) == 3:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(refine_module.Trainer, "train_step", three_steps)
    with pytest.raises(KeyboardInterrupt):
        refine(run, corpus, tmp_path / "parts", whole)
    assert latest(tmp_path / "parts") is None  # no whole result yet
    monkeypatch.setattr(refine_module.Trainer, "train_step", step)
    record = refine(run, corpus, tmp_path / "parts", whole)
    assert record["own_text_kept_out"]["before"] == latest_record(tmp_path / "whole")["own_text_kept_out"]["before"]
    expected, found = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "parts")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def latest_record(folder: Path) -> dict[str, Any]:
    found = latest(folder)
    assert found is not None
    refined: dict[str, Any] = found["refined"]
    return refined


@pytest.mark.covers(148, 165)
def test_the_result_is_evaluated_and_exported_like_a_run_and_says_what_was_done(
    run: Path, refined: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--corpus", corpus_folder, "--tokens", 60, "--prompts", 4, "--reply", 8, "--temperatures", 0, 0.7)
    assert command("evaluate", "--run", run, *words) == 0
    before = json.loads(capsys.readouterr().out)
    assert command("evaluate", "--run", refined, *words) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["main_only"] == before["main_only"]
    assert after["mtp_assisted"] != before["mtp_assisted"]
    assert [found["text"] for found in after["self_fed"]] == [
        "the main model's own greedy replies",
        "the main model's own replies, seeded at temperature 0.7",
    ]
    export_run(refined, corpus_folder, tmp_path)
    manifest = open_checkpoint(str(tmp_path)).manifest.mtp
    assert manifest is not None
    record = json.loads(manifest.training_json)["refined"]
    assert record["fit"]["divergence"] == "kl"
    assert record["samples"]["tokens"] == 600
    assert record["from_step"] == 20
    assert record["trained"].startswith("model.layers.2.*")


def test_a_refined_run_is_not_trained_on_jointly(refined: Path, corpus_folder: Path) -> None:
    with pytest.raises(TrainingError, match="continue the run it came from"):
        trainer_in(refined, corpus_folder, ONE)


def test_what_cannot_be_refined_is_refused_before_anything_is_computed(
    run: Path, corpus: Corpus, corpus_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidField, match="the run itself"):
        refine(run, corpus, run, plan())
    with pytest.raises(TrainingError, match="no step was saved yet"):
        refine(tmp_path / "nothing", corpus, tmp_path / "out", plan())
    long = replace(plan(), samples=replace(plan().samples, reply_len=CONFIG.max_position))
    with pytest.raises(InvalidField, match="at most 64 together"):
        refine(run, corpus, tmp_path / "out", long)
    for name, recipe, says in (
        ("two", RECIPE, "one MTP module"),
        ("heads", replace(ONE, objective=replace(ONE.objective, wiring=Wiring.INDEPENDENT)), "baseline"),
    ):
        trainer_in(tmp_path / name, corpus_folder, recipe).save()
        with pytest.raises(TrainingError, match=says):
            refine(tmp_path / name, corpus, tmp_path / "out", plan())
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_work_is_refused(run: Path, refined: Path, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="another plan, or another step"):
        refine(run, corpus, refined, plan(steps=41))
    (tmp_path / "latest.json").write_text("{}")
    with pytest.raises(TrainingError, match="holds a run already"):
        refine(run, corpus, tmp_path, plan())


def test_a_full_disk_is_named_and_leaves_no_half_step(
    run: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(own_samples, "write_shard", full)
    with pytest.raises(CheckpointNotWritten, match=r"No space left.*start the same command again"):
        refine(run, corpus, tmp_path, plan())
    assert latest(tmp_path) is None


def test_a_loss_that_is_no_number_is_not_applied(run: Path, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(LossDiverged, match="nothing was applied"):
        refine(run, corpus, tmp_path, plan(lr=1e30))
    assert latest(tmp_path) is None

"""A run on one rank: it learns, it says what it did, it resumes exactly, and no fault costs a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import PLAN, RECIPE, counting_documents, make_corpus, trainer_in
from tiny_v3 import CONFIG

from seqmtp_serve.errors import BadCorpus, CheckpointNotWritten, LossDiverged, SharingBroken, TrainingError
from seqmtp_serve.training.joint import trainer as trainer_module
from seqmtp_serve.training.joint.cli import begin, chosen_recipe
from seqmtp_serve.training.joint.corpus import read_corpus
from seqmtp_serve.training.joint.evaluate import evaluate
from seqmtp_serve.training.joint.export import trained_model
from seqmtp_serve.training.joint.recipe import recipe_from_record
from seqmtp_serve.training.joint.run_files import latest, own_tensors
from seqmtp_serve.training.joint.streams import epoch_streams, share_of
from seqmtp_serve.training.joint.trainer import JointTrainer
from seqmtp_serve.training.mtp_objective import Reduction


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def steps(trainer: JointTrainer, until: int) -> list[dict[str, Any]]:
    return list(trainer.run(save_every_s=1e9, until=until))


def same_state(left: JointTrainer, right: JointTrainer) -> bool:
    """Parameters, gate biases and both moments, bit for bit."""
    ours, theirs = own_tensors(left.model), own_tensors(right.model)
    moments = all(
        torch.equal(left.optimizer.state[p][kind], right.optimizer.state[q][kind])
        for (p, q) in zip(left.model.parameters(), right.model.parameters(), strict=True)
        for kind in ("step", "exp_avg", "exp_avg_sq")
    )
    return moments and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.covers(147)
def test_a_run_learns_and_both_evaluations_are_reported_apart(corpus: Path, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, corpus)
    lines = steps(trainer, 40)
    assert lines[-1]["main"]["loss"] < 0.7 * lines[0]["main"]["loss"]
    for depth in (0, 1):
        ratio = [lines[at]["mtp"][depth]["nll_sum"] / lines[at]["mtp"][depth]["rows"] for at in (0, -1)]
        assert ratio[1] < ratio[0]
    _, model, _ = trained_model(tmp_path)
    found = evaluate(model, read_corpus(corpus, "held_out", CONFIG.vocab_size), window=24, most_tokens=150)
    assert set(found) == {"tokens", "main_only", "mtp_assisted"}
    assert found["main_only"]["nll"] < 3.9  # ln 48 = 3.87 is chance, and it was above it at the start
    one, two = found["mtp_assisted"]
    assert (one["depth"], two["depth"], one["fed"]) == (1, 2, "teacher-forced")
    assert 0 <= one["greedy_acceptance"] <= 1
    assert 0 < one["acceptance_at_temperature_1"] < 1


@pytest.mark.covers(148)
def test_the_main_figures_do_not_depend_on_the_modules(corpus: Path, tmp_path: Path) -> None:
    steps(trainer_in(tmp_path, corpus), 3)
    _, model, _ = trained_model(tmp_path)
    held_out = read_corpus(corpus, "held_out", CONFIG.vocab_size)
    before = evaluate(model, held_out, window=24, most_tokens=100)["main_only"]
    with torch.no_grad():
        for depth in (1, 2):
            model.mtp_layer(depth).eh_proj.weight.zero_()
    assert evaluate(model, held_out, window=24, most_tokens=100)["main_only"] == before


@pytest.mark.covers(36, 40, 108, 119, 143, 146)
def test_every_observable_of_a_step_is_in_its_line(corpus: Path, tmp_path: Path) -> None:
    lines = steps(trainer_in(tmp_path, corpus), 5)
    data = read_corpus(corpus, "train", CONFIG.vocab_size)
    streams = epoch_streams(data, window=PLAN.window, stream_len=PLAN.stream_len, seed=PLAN.seed, epoch=0)
    for at, line in enumerate(lines):
        windows = [window for stream in streams[2 * at : 2 * at + 2] for window in stream]
        assert line["mtp_form"] == "paper_fixed_T"
        assert [depth["depth"] for depth in line["mtp"]] == [1, 2]
        for depth in line["mtp"]:
            assert depth["denominator"] == PLAN.tokens_per_step  # the declared T, whatever the rows
            assert depth["rows"] < depth["denominator"]
            assert depth["loss"] == depth["nll_sum"] / depth["denominator"]
            assert 0 <= depth["accuracy"] <= 1
        assert line["mtp"][1]["rows"] < line["mtp"][0]["rows"] < line["main"]["rows"]
        assert line["gradient_norm"] > 0
        assert set(line["shared_gradients"]) == {"mtp_to_trunk", "mtp_to_embedding", "mtp_to_head"}
        assert all(norm > 0 for norm in line["shared_gradients"].values())
        assert set(line["expert_load"]) == {"layer 1", "layer 2", "layer 3"}  # two of them are MTP blocks
        for depth, layer in enumerate(("layer 1", "layer 2", "layer 3")):  # the main model's, then each depth's
            rows = sum(max(len(window) - depth, 0) for window in windows)
            assert sum(line["expert_load"][layer]) == CONFIG.moe.top_k * rows
        assert line["sent_bytes"] == 0
    assert [line["loss_weight"] for line in lines] == [0.3, 0.3, 0.3, 0.1, 0.1]  # the boundary is at three steps
    assert [line["tokens"] for line in lines] == [128, 256, 384, 512, 640]


@pytest.mark.covers(119)
def test_a_logged_loss_can_be_recomputed_and_a_false_name_shows(corpus: Path, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, corpus)
    (line,) = steps(trainer, 1)
    depth = line["mtp"][0]
    assert depth["loss"] == depth["nll_sum"] / depth["denominator"]
    assert depth["loss"] != depth["nll_sum"] / depth["rows"]  # what a valid-row mean would have logged
    other = replace(RECIPE, objective=replace(RECIPE.objective, reduction=Reduction.VALID_ROW_MEAN))
    (valid,) = steps(trainer_in(tmp_path / "valid", corpus, other), 1)
    assert valid["mtp_form"] == "valid_row_mean"
    assert valid["mtp"][0]["denominator"] == valid["mtp"][0]["rows"]


def test_an_interrupted_run_is_the_uninterrupted_one_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    """Past an epoch's end, so that the order of the next epoch is resumed too."""
    whole = trainer_in(tmp_path / "whole", corpus)
    lines = steps(whole, 24)
    assert lines[-1]["epoch"] > lines[0]["epoch"]
    first = trainer_in(tmp_path / "cut", corpus)
    steps(first, 9)
    resumed = trainer_in(tmp_path / "cut", corpus)
    assert resumed.progress.step == 9
    assert same_state(first, resumed)
    again = steps(resumed, 24)
    assert same_state(whole, resumed)
    for line, other in zip(lines[9:], again, strict=True):
        assert {k: v for k, v in line.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}


@pytest.mark.covers(11)
def test_a_folder_keeps_its_recipe(corpus: Path, tmp_path: Path) -> None:
    begin(tmp_path, RECIPE)
    assert recipe_from_record(json.loads((tmp_path / "recipe.json").read_text())) == RECIPE
    begin(tmp_path, RECIPE)
    with pytest.raises(TrainingError, match="another recipe"):
        begin(tmp_path, replace(RECIPE, optimization=replace(PLAN, seed=4)))
    assert chosen_recipe(str(tmp_path / "recipe.json"), layout="data", tokens=999).layout == "data"


def test_a_run_of_other_ranks_or_layout_is_not_continued(corpus: Path, tmp_path: Path) -> None:
    steps(trainer_in(tmp_path, corpus), 1)
    record = json.loads((tmp_path / "latest.json").read_text())
    (tmp_path / "latest.json").write_text(json.dumps(record | {"ranks": 2}))
    with pytest.raises(TrainingError, match="2 ranks in layout 'expert'"):
        trainer_in(tmp_path, corpus)


@pytest.mark.covers(48, 115, 141)
def test_a_run_with_an_unshared_head_does_not_start(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copying(model: Any, **kwargs: Any) -> None:
        head = model.mtp_layer(1).shared_head
        head.head = type(head.head)(CONFIG.hidden_size, CONFIG.vocab_size, model.arithmetic)

    monkeypatch.setattr(trainer_module, "initialise", copying)
    with pytest.raises(SharingBroken, match=r"shared_head.head.weight: independent_copies"):
        trainer_in(tmp_path, corpus)


def test_a_full_disk_leaves_the_last_checkpoint(corpus: Path, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, corpus)
    steps(trainer, 2)
    before = own_tensors(trainer.model)["lm_head.weight"].clone()
    trainer.step()
    step = tmp_path / "step-00000003"
    step.mkdir()
    (step / "rank0.safetensors").symlink_to("/dev/full")  # every write to it says: no space left on device
    with pytest.raises(CheckpointNotWritten, match="No space left on device; step 2 is intact"):
        trainer.save()
    assert not step.exists()
    resumed = trainer_in(tmp_path, corpus)
    assert resumed.progress.step == 2
    assert torch.equal(own_tensors(resumed.model)["lm_head.weight"], before)


def test_a_loss_that_is_no_number_applies_nothing(corpus: Path, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, corpus)
    steps(trainer, 1)
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = float("nan")
    before = {name: tensor.clone() for name, tensor in own_tensors(trainer.model).items()}
    with pytest.raises(LossDiverged, match=r"step 2: losses .* nothing was applied"):
        trainer.step()
    for name, tensor in own_tensors(trainer.model).items():
        assert torch.equal(tensor.nan_to_num(7), before[name].nan_to_num(7)), name
    assert trainer.progress.step == 1
    assert latest(tmp_path)["progress"]["step"] == 1  # type: ignore[index]


def damaged(folder: Path, how: str) -> None:
    path = folder / "train.safetensors"
    if how == "missing":
        path.unlink()
    elif how == "a flipped bit":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        tensors = load_file(path)
        if how == "an id too large":
            tensors["tokens"][5] = CONFIG.vocab_size
        elif how == "boundaries":
            tensors["starts"][1] = 0
        elif how == "nothing":
            tensors = {"tokens": tensors["tokens"][:0], "starts": torch.tensor([0])}
        save_file(tensors, path)
        seal(folder)


def seal(folder: Path) -> None:
    """Make the record agree with the file again: then only the content is wrong."""
    from seqmtp_serve.checkpoint.fingerprint import file_fingerprint

    record = json.loads((folder / "corpus.json").read_text())
    record["sha256"]["train.safetensors"] = file_fingerprint(folder / "train.safetensors")
    (folder / "corpus.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "no readable corpus"),
        ("a flipped bit", "its record names sha256"),
        ("an id too large", "ids outside 0..47"),
        ("boundaries", "document boundaries"),
        ("nothing", "holds no tokens"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, how: str, message: str) -> None:
    make_corpus(tmp_path)
    damaged(tmp_path, how)
    with pytest.raises(BadCorpus, match=message):
        read_corpus(tmp_path, "train", CONFIG.vocab_size)


def test_a_corpus_of_another_vocabulary_or_too_small_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(BadCorpus, match="a vocabulary of 48, the model has 50"):
        read_corpus(corpus, "train", 50)
    huge = replace(RECIPE, optimization=replace(PLAN, streams_per_step=999))
    with pytest.raises(BadCorpus, match="a step reads 999"):
        steps(trainer_in(tmp_path, corpus, huge), 1)


def test_an_epoch_reads_every_token_once_in_an_order_of_its_seed(corpus: Path) -> None:
    data = read_corpus(corpus, "train", CONFIG.vocab_size)

    def order(seed: int, epoch: int) -> list[list[list[int]]]:
        return epoch_streams(data, window=24, stream_len=64, seed=seed, epoch=epoch)

    streams = order(1, 0)
    windows = sorted(window for stream in streams for window in stream)
    documents = counting_documents(60, 1)
    assert windows == sorted(document[at : at + 24] for document in documents for at in range(0, len(document), 24))
    assert all(sum(map(len, stream)) <= 64 for stream in streams)
    assert sum(map(len, windows)) > 0.9 * 64 * len(streams)  # little padding
    assert streams == order(1, 0)
    assert len({json.dumps(order(seed, epoch)) for seed, epoch in ((1, 0), (1, 1), (2, 0))}) == 3
    assert [share_of(rank, 2, streams[:4]) for rank in range(2)] == [streams[:2], streams[2:4]]
    with pytest.raises(ValueError, match="shared out evenly"):
        share_of(0, 3, streams[:4])


@pytest.mark.parametrize("window", [65, 1000])
def test_a_window_that_does_not_fit_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match="the stream and the model hold 64"):
        replace(RECIPE, optimization=replace(PLAN, window=window))


def test_the_learning_rate_rises_then_falls() -> None:
    rates = [PLAN.lr_at(step) for step in range(PLAN.steps)]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert all(b < a for a, b in pairwise(rates[4:]))
    assert rates[-1] == pytest.approx(PLAN.lr * PLAN.final_lr_share, rel=0.1)

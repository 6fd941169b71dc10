"""What a run leaves behind: a checkpoint others read, a picture, and the same from the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_run import RECIPE, log_of, make_corpus, trainer_in
from tiny_v3 import CONFIG, random_documents, tiny_v3

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.errors import InvalidField, TrainingError
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.training.joint import cli
from seqmtp_serve.training.joint.export import export_run, released_tensors, trained_model
from seqmtp_serve.training.joint.plot import draw_progress, imbalance, thinned
from seqmtp_serve.training.joint.recipe import recipe_from_record
from seqmtp_serve.training.joint.recipes import RECIPES, V3_TINY
from seqmtp_serve.training.joint.stdlib_corpus import build_stdlib_corpus, library_files, train_tokenizer
from seqmtp_serve.training.packing import compile_stream, pack
from seqmtp_serve.training.v3.model import V3Model
from services.gateway.text_model import open_text_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    command("run", "--recipe", recipe_file(folder), "--corpus", corpus, "--out", folder / "run", "--until", 5)
    return folder / "run"


def recipe_file(folder: Path) -> Path:
    path = folder / "chosen.json"
    path.write_text(json.dumps(RECIPE.record()))
    return path


def command(*words: object) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([str(word) for word in words]))


@pytest.mark.covers(66, 148)
def test_an_export_is_a_checkpoint_that_transformers_reads(run: Path, corpus: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    export_run(run, corpus, tmp_path)
    _, model, _ = trained_model(run)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.shape != (CONFIG.moe.num_experts, CONFIG.hidden_size):  # the gate stays in float32
                parameter.copy_(parameter.bfloat16())
        document = random_documents([20])[0]
        ours = model.logits(model.main_states(compile_stream(pack([document]), 1).main))
        torch.testing.assert_close(theirs(torch.tensor([document])).logits[0], ours, rtol=1e-3, atol=1e-3)


@pytest.mark.covers(8, 63, 66, 148, 165)
def test_names_and_copies_are_the_released_ones(run: Path, corpus: Path, tmp_path: Path) -> None:
    export_run(run, corpus, tmp_path / "whole")
    export_run(run, corpus, tmp_path / "main", with_mtp=False)
    found = {}
    for kind in ("whole", "main"):
        with safe_open(tmp_path / kind / "model.safetensors", "pt") as stored:
            found[kind] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    whole, main = found["whole"], found["main"]
    assert all(torch.equal(whole[name], main[name]) for name in main)
    extra = whole.keys() - main.keys()
    assert {int(name.split(".")[2]) for name in extra} == {2, 3}  # after the main layers 0 and 1
    for copy, owner in (
        ("embed_tokens", "model.embed_tokens"),
        ("shared_head.head", "lm_head"),
        ("shared_head.norm", "model.norm"),
    ):
        assert torch.equal(whole[f"model.layers.2.{copy}.weight"], whole[f"{owner}.weight"])
    config = json.loads((tmp_path / "main" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    assert {tensor.dtype for name, tensor in whole.items() if ".gate." in name} == {torch.float32}
    assert {tensor.dtype for name, tensor in whole.items() if ".gate." not in name} == {torch.bfloat16}


@pytest.mark.covers(10, 41, 146)
def test_the_record_travels_with_the_weights(run: Path, corpus: Path, tmp_path: Path) -> None:
    export_run(run, corpus, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    checkpoint.gates().target.require()
    gate = checkpoint.gates().mtp
    assert gate is not None
    gate.require()
    mtp = checkpoint.manifest.mtp
    assert mtp is not None
    assert mtp.config() == RECIPE.mtp
    record = json.loads(mtp.training_json)
    assert recipe_from_record(record["recipe"]) == RECIPE
    words = record["recipe"]["objective_in_words"]
    assert words["mtp_reduction"] == "paper_fixed_T"
    assert words["loss_weight_phases"] == [[0, 0.3], [384, 0.1]]
    assert record["corpus"]["licence"] == "none"
    assert record["progress"]["step"] == 5
    copies = 3 * (2 * CONFIG.vocab_size * CONFIG.hidden_size + CONFIG.hidden_size)
    biases = 3 * CONFIG.moe.num_experts
    assert copies // 3 * 2 == record["parameters"]["stored"] - record["parameters"]["unique"] - biases


@pytest.mark.covers(13, 58, 59)
def test_a_fusion_trained_in_the_other_order_is_stored_in_the_released_one() -> None:
    model = tiny_v3(1, mtp=MtpConfig(fusion_order="he"))
    stored = released_tensors(model)["model.layers.2.eh_proj.weight"]
    own = model.mtp_layer(1).eh_proj.weight.detach()
    d = CONFIG.hidden_size
    assert torch.equal(stored, torch.cat((own[:, d:], own[:, :d]), 1).bfloat16())
    assert torch.equal(released_tensors(tiny_v3(1))["model.layers.2.eh_proj.weight"], own.bfloat16())


def test_a_conversation_is_put_to_it_as_one_text(run: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    train_tokenizer(["def f(x):\n"], 300).save(str(tmp_path / "corpus" / "tokenizer.json"))
    export_run(run, tmp_path / "corpus", tmp_path / "out")
    text = open_text_model(str(tmp_path / "out"))
    assert text.template is not None
    turns = [("system", "a"), ("user", "b"), ("assistant", " c"), ("user", "d")]
    rendered = text.template.render([{"role": role, "content": content} for role, content in turns])
    assert rendered == "<bos>a\nb c\nd"
    assert (text.bos_token_id, text.eos_token_ids) == (0, (1,))


def test_a_run_without_a_step_cannot_be_exported(corpus: Path, tmp_path: Path) -> None:
    trainer_in(tmp_path / "run", corpus)
    with pytest.raises(TrainingError, match="no step was saved yet"):
        export_run(tmp_path / "run", corpus, tmp_path / "out")


@pytest.mark.covers(108)
def test_the_picture_is_drawn_and_drawn_anew(run: Path) -> None:
    picture = run / "progress.svg"
    assert picture.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    assert len(log_of(run)) == 5
    assert not draw_progress(run, every_s=1e6)
    picture.unlink()
    assert draw_progress(run, every_s=1e6)
    assert command("plot", "--run", run) == 0


def test_the_picture_thins_a_long_log_and_keeps_its_end() -> None:
    lines: list[dict[str, Any]] = [{"step": step} for step in range(1001)]
    kept = [line["step"] for line in thinned(lines, 100)]
    assert len(kept) <= 100
    assert kept[-1] == 1000
    assert imbalance([2, 0, 0, 2]) == 2.0


def test_no_log_no_picture(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="no log"):
        command("plot", "--run", tmp_path)


def test_evaluation_from_the_command_line(run: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("evaluate", "--run", run, "--corpus", corpus, "--tokens", 100, "--prompts", 1, "--reply", 5) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] <= 100
    assert len(found["mtp_assisted"]) == 2
    assert found["self_fed"][0]["rounds"] > 0


def test_an_unknown_recipe_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="neither a file nor one of v3-tiny"):
        command("run", "--recipe", "v4", "--corpus", tmp_path, "--out", tmp_path)


def test_a_corpus_of_library_source(tmp_path: Path) -> None:
    root = tmp_path / "lib"
    (root / "test").mkdir(parents=True)
    for at in range(90):
        (root / f"module{at}.py").write_text(f"def function_{at}(x):\n    return x + {at}\n")
    (root / "copy.py").write_text((root / "module1.py").read_text())  # the same text again
    (root / "test" / "test_module.py").write_text("left_out = 1\n")
    assert len(library_files(root)) == 91
    about = build_stdlib_corpus(tmp_path / "out", vocab_size=300, root=root)
    record = json.loads((tmp_path / "out" / "corpus.json").read_text())
    assert record["documents"]["train"] + record["documents"]["held_out"] == 90
    assert record["licence"] == "PSF-2.0"
    assert 0 < len(about["held_out_files"]) < 20
    from tokenizers import Tokenizer

    from seqmtp_serve.training.joint.corpus import read_corpus

    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    document = read_corpus(tmp_path / "out", "held_out", record["vocab_size"]).document(0)
    assert (document[0], document[-1]) == (0, 1)
    assert tokenizer.decode(document[1:-1]) == (root / about["held_out_files"][0]).read_text()


def test_the_shipped_recipe_is_of_the_announced_shape() -> None:
    recipe = RECIPES["v3-tiny"]
    assert (recipe.model.kv_lora_rank, recipe.model.rope_head_dim) == (512, 64)
    assert recipe.model.moe.num_experts == 16
    assert recipe.mtp.num_modules == 1
    with torch.device("meta"):
        model = V3Model(replace(V3_TINY.model, max_position=8), V3_TINY.mtp)
    unique = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(tensor.numel() for tensor in model.state_dict().values())
    assert 5e6 <= unique <= 12e6
    assert 2 * stored <= 24e6

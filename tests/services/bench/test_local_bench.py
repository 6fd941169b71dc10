"""`seqmtp bench speculation` on real engines in this process, with a tiny random model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from tiny_checkpoint import CONFIG, MTP_LAYER, TinyFiles
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from seqmtp_serve.checkpoint import names
from seqmtp_serve.frontier.depth_choice import replay
from services.bench import cli


@pytest.fixture
def files(tmp_path: Path) -> TinyFiles:
    """The tiny checkpoint with a tokenizer of one token a letter, and prompts."""
    files = TinyFiles(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({chr(64 + i): i for i in range(CONFIG.vocab_size)}, unk_token="@"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(files.target / "tokenizer.json"))
    (files.target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": text}) for text in ("ABBA", "CDE", "FGHIJ"))
    )
    return files


def bench(files: TinyFiles, *argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    prompts = str(files.target.parent / "prompts.jsonl")
    options = ["--prompts", prompts, "--weights", "fp32", "--max-tokens", "12", "--repeats", "1", "--json"]
    return cli.run(parser.parse_args(["speculation", str(files.target), *options, *argv]))


@pytest.mark.covers(72, 102, 106)
def test_text_is_equal_at_every_depth_and_costs_are_disjoint(
    files: TinyFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "depths.jsonl"
    more = ("--concurrency", "1,3", "--depths", "0,1,2,3,auto", "--depth-ledger", str(ledger))
    assert bench(files, "--mtp", str(files.mtp), *more) == 0
    assert replay([json.loads(line) for line in ledger.read_text().splitlines()]) == []
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["numerics"]) == ("target", "invariant")
    assert len(report["runs"]) == 10
    for run in report["runs"]:
        assert run["text_equal"]
        if run["depth"] == "auto":
            continue
        costs = run["ledger_ms"]
        assert costs["c_main"] > 0
        assert (costs["c_verify"] > 0) == (run["depth"] > 0)
        assert costs["c_mtp"] > 0 or run["depth"] == 0
        assert len(run["acceptance_by_position"]) == run["depth"]


def test_depth_0_alone_needs_no_mtp_part(files: TinyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(files, "--depths", "0", "--concurrency", "1") == 0
    assert [run["depth"] for run in json.loads(capsys.readouterr().out)["runs"]] == [0]


@pytest.mark.covers(62)
def test_a_failed_mtp_gate_ends_the_bench_by_name(files: TinyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    files.edit_tensors(files.mtp, **{MTP_LAYER + names.ENORM: None})
    assert bench(files, "--mtp", str(files.mtp)) == 1
    assert "enorm.weight: is missing" in capsys.readouterr().err


def test_the_second_time_a_prompt_is_found_in_the_cache(files: TinyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    options = ["--mtp", str(files.mtp), "--words", "8", "--repeats", "2", "--max-tokens", "6", "--weights", "fp32"]
    assert cli.run(parser.parse_args(["prefix", str(files.target), *options, "--json"])) == 0
    (found,) = json.loads(capsys.readouterr().out)["prompts"]
    assert found["cached_tokens"] == (found["prompt_tokens"] - 1) // 64 * 64 > 0
    assert found["text_equal"]
    assert found["first_token_ratio"] > 0


def test_all_forms_of_hidden_rows_are_asked_the_same(files: TinyFiles, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    options = ["--mtp", str(files.mtp), "--windows", "0,4", "--dtypes", "fp32,int8", "--weights", "fp32", "--json"]
    few = ["--num-prompts", "2", "--prompt-chars", "30", "--max-tokens", "10"]
    assert cli.run(parser.parse_args(["hidden", str(files.target), *options, *few])) == 0
    report = json.loads(capsys.readouterr().out)
    forms = {(form["window"], form["dtype"]): form for form in report["hidden"]}
    assert forms.keys() == {(None, "fp32"), (4, "fp32"), (None, "int8")}
    plain, window, small = forms.values()
    assert plain["places"] == window["places"] == small["places"] > 0
    assert all(len(form["acceptance_by_position"]) == 3 for form in forms.values())
    assert all(
        form["e_r"] == pytest.approx(1 + sum(form["acceptance_by_position"]), abs=1e-3) for form in forms.values()
    )
    d = CONFIG.hidden_size
    assert window["prompt_bytes"] == 4 * d * 4 < plain["prompt_bytes"]
    assert small["prompt_bytes"] / plain["prompt_bytes"] == pytest.approx((d + 4) / (4 * d), rel=0.01)

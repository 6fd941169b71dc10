"""What a built-in model brings to the settings, the banner and the bench; and that a person's word still wins."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from seqmtp_serve.checkpoint.locate import BUILTIN_MODELS, CHAT_MODEL, CODE_MODEL, locate
from seqmtp_serve.errors import ModelNotFound
from services import banner
from services.bench.prompts import OWN_PROMPTS, PYTHON_PROMPTS, prompts_for, read_prompts
from services.builtin_models import builtin_model
from services.settings import EngineSettings, Settings
from services.settings_sources import load

READY = banner.Readiness(ready=True, body={"model": "served", "mtp": {"ready": True}})


def test_the_code_model_is_served_on_two_ranks_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"model": {"path": CODE_MODEL}}
    assert load(named).engine == EngineSettings(target_ranks=2, weights="fp32", max_model_len=1024)
    assert load({**named, "engine": {"target_ranks": 1}}).engine.target_ranks == 1
    yaml = tmp_path / "settings.yaml"
    yaml.write_text(f"model: {{path: {CODE_MODEL}}}\nengine: {{weights: int8}}\n")
    assert (load({}, yaml).engine.weights, load({}, yaml).engine.target_ranks) == ("int8", 2)
    monkeypatch.setenv("SEQMTP_ENGINE__TARGET_RANKS", "4")
    assert load(named).engine.target_ranks == 4


@pytest.mark.parametrize("flags", [{}, {"model": {"path": CHAT_MODEL}}, {"model": {"path": "./v3-tiny"}}])
def test_no_other_model_brings_anything(flags: dict[str, dict[str, str]]) -> None:
    assert load(flags).engine == Settings().engine


def test_the_banner_says_what_it_is_and_how_to_ask_it() -> None:
    said = banner.text(load({"model": {"path": CODE_MODEL}}), READY, 9.0)
    assert "it continues Python code, it does not chat" in " ".join(said.split())
    assert "trained here" not in banner.text(Settings(), READY, 9.0)


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_the_banners_command_is_a_request(name: str) -> None:
    words = shlex.split(builtin_model(name).curl("http://127.0.0.1:8000", "served"))
    assert words[:2] == ["curl", "-N"]
    assert words[2].startswith("http://127.0.0.1:8000/v1/")
    body = json.loads(words[-1])
    assert (body["model"], body["stream"]) == ("served", True)
    assert ("messages" in body) == words[2].endswith("/chat/completions")


def test_a_bench_asks_each_model_what_it_can_answer() -> None:
    assert prompts_for(CODE_MODEL) == PYTHON_PROMPTS
    assert prompts_for(CHAT_MODEL) == prompts_for("some/folder") == OWN_PROMPTS
    assert len(set(read_prompts(PYTHON_PROMPTS, 24))) == 24


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match=f"{CHAT_MODEL} or {CODE_MODEL}"):
        locate("v4-tiny")

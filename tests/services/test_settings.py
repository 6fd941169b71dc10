"""Settings: flags over environment over YAML over defaults; unknown settings are named; secrets stay secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqmtp_serve.config import Kernels
from seqmtp_serve.errors import InvalidField
from services.core_config import engine_config
from services.flags import FLAGS, shown
from services.settings import Settings, from_json
from tests.services.parsed import parse


def test_each_layer_covers_the_one_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = tmp_path / "settings.yaml"
    yaml.write_text("engine: {max_model_len: 100, max_num_seqs: 3, page_size: 32}\ngateway: {port: 1}\n")
    monkeypatch.setenv("SEQMTP_ENGINE__MAX_MODEL_LEN", "200")
    monkeypatch.setenv("SEQMTP_ENGINE__MAX_NUM_SEQS", "4")
    settings = parse("--config", str(yaml), "--max-model-len", "300")
    assert settings.engine.max_model_len == 300  # flag
    assert settings.engine.max_num_seqs == 4  # environment
    assert settings.engine.page_size == 32  # YAML
    assert settings.scheduler == Settings().scheduler  # default
    assert settings.gateway.port == 1


def test_vllm_words() -> None:
    settings = parse(
        "some/model",
        *("--host", "0.0.0.0", "--port", "9000", "--served-model-name", "m", "--max-num-seqs", "2"),
        *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
    )
    assert settings.model.path == "some/model"
    assert (settings.gateway.host, settings.gateway.port, settings.model.served_name) == ("0.0.0.0", 9000, "m")
    assert settings.speculation.num_speculative_tokens == 2


def test_backends_are_named_by_flag_variable_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("kernels: {experts: torch, attention: sdpa}\n")
    monkeypatch.setenv("SEQMTP_KERNELS__ATTENTION", "torch")
    settings = parse("--config", str(file), "--all2all-backend", "local", "--prefill-backend", "sdpa")
    assert engine_config(settings).kernels == Kernels(
        attention="torch", prefill="sdpa", experts="torch", dispatch="local"
    )
    assert engine_config(Settings()).kernels == Kernels()


def test_every_flag_names_a_setting_and_loopback_is_the_default() -> None:
    dumped = Settings().model_dump()
    for path in FLAGS.values():
        node = dumped
        for part in path.split("."):
            assert part in node, path
            node = node[part]
    assert Settings().gateway.host == Settings().rpc.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("engine: {max_model_length: 5}", "engine.max_model_length"),
        ("gateway: {port: 70000}", "gateway.port"),
        ("speculation: {num_speculative_tokens: -1}", "speculation.num_speculative_tokens"),
        ("[1]", "mapping"),
        ("a: [", "cannot read"),
        ("registry: {ttl_s: 1.0, period_s: 0.9}", "registry.ttl_s"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, text: str, names: str) -> None:
    yaml = tmp_path / "settings.yaml"
    yaml.write_text(text)
    with pytest.raises(InvalidField, match=names):
        parse("--config", str(yaml))


def test_secrets_are_starred_but_reach_child_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQMTP_STORE__PASSWORD", "hunter2")
    settings = parse()
    assert "hunter2" not in f"{settings!r} {settings} {shown(settings)}"
    resolved = tmp_path / "resolved.json"
    resolved.write_text(settings.to_json())
    monkeypatch.setenv("SEQMTP_STORE__PASSWORD", "other")
    monkeypatch.setenv("SEQMTP_GATEWAY__PORT", "1")
    child = parse("--settings", str(resolved))
    assert child == settings == from_json(settings.to_json())
    assert child.store.resolved_password() == "hunter2"


def test_password_file_wins_and_is_stripped(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("from-file\n")
    settings = parse("--redis-password-file", str(secret))
    assert settings.store.resolved_password() == "from-file"


def test_the_tree_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().engine.max_model_len = 1  # type: ignore[misc]

"""The one settings tree: built once at the edge (`services/settings_sources.py`), frozen, passed down.

Secrets are `SecretStr`: they never appear in a log, a repr or `seqmtp config show`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

_FROZEN = ConfigDict(frozen=True, extra="forbid")
_DEVICE = r"^(cpu|cuda(:\d{1,3})?)$"


class ModelSettings(BaseModel):
    """What is served."""

    model_config = _FROZEN
    path: str = Field(
        default="smollm2-135m-instruct", description="checkpoint: a directory, a .gguf file or a built-in name"
    )
    mtp: str | None = Field(default=None, description="MTP checkpoint; default: the one that belongs to the model")
    served_name: str | None = Field(default=None, description="name in the API; default: the model's own")
    chat_template: Path | None = Field(default=None, description="Jinja file; default: the model's own")


class SpeculationSettings(BaseModel):
    """How many tokens a round may draft; 0 is ordinary decoding."""

    model_config = _FROZEN
    method: Literal["mtp"] = Field(default="mtp", description="where drafts come from")
    num_speculative_tokens: int = Field(default=3, ge=0, le=8, description="drafts of one round at most")
    proposer: Literal["remote", "colocated"] = Field(
        default="remote", description="remote: processes of its own, found in the registry; colocated: in the target's"
    )
    depth_policy: Literal["static", "auto"] = Field(
        default="auto", description="auto: as many drafts as pay, by the ledger; static: as many as allowed"
    )
    hidden_window: int = Field(
        default=0, ge=0, description="hidden rows of a prompt that a proposer is given, the last so many; 0: all"
    )
    hidden_dtype: Literal["fp32", "fp16", "bf16", "int8"] = Field(
        default="fp32", description="form of hidden rows on their way to a proposer; only drafts depend on it"
    )
    prompt_lookup: bool = Field(
        default=True, description="drafts may be copied from the request's own text; only drafts depend on it"
    )
    max_copied_tokens: int = Field(
        default=8,
        ge=0,
        le=64,
        description="copied drafts of a round where that is above the depth; depth_policy auto",
    )
    draft_top_n: int = Field(default=16, ge=1, le=256, description="entries of the declared sparse draft distribution")
    device: str | None = Field(
        default=None, pattern=_DEVICE, description="device of the MTP module; default: as engine.device"
    )


class EngineSettings(BaseModel):
    """One target or proposer worker."""

    model_config = _FROZEN
    numerics: Literal["invariant", "fast"] = Field(
        default="invariant", description="invariant: same bits for any batch; fast on a GPU unless said"
    )
    weights: Literal["int8", "fp32", "bf16"] = Field(
        default="int8", description="weight format of the matrix products; int8 is a CPU's; bf16 on a GPU unless said"
    )
    device: str = Field(
        default="cpu", pattern=_DEVICE, description="cpu, cuda (each rank of a group takes its own), or cuda:N"
    )
    max_model_len: int = Field(default=2048, ge=16, description="prompt and output of a request together, tokens")
    max_num_seqs: int = Field(default=16, ge=1, description="sequences running at a time")
    page_size: int = Field(default=64, ge=1, description="tokens of a KV page")
    num_pages: int | None = Field(
        default=None, ge=1, description="KV pages; default: enough for max_num_seqs full contexts"
    )
    prefix_cache_pages: int = Field(
        default=128,
        ge=0,
        description="KV pages kept after their text ended, for texts that start alike; 0: none",
    )
    num_threads: int = Field(default=1, ge=1, description="threads of one worker's matrix products")
    target_ranks: int = Field(
        default=1, ge=1, le=64, description="processes of a target group: sequences and experts are shared out"
    )


class KernelSettings(BaseModel):
    """Which backend computes what, by name; a named one that cannot run here ends the worker (`seqmtp backends`)."""

    model_config = _FROZEN
    attention: str = Field(default="auto", description="latent attention: auto, flashinfer, paged, sdpa or torch")
    prefill: str = Field(default="auto", description="its naive form, in fast numerics: auto, sdpa or torch")
    experts: str = Field(default="auto", description="product of the experts: auto, torch-grouped or torch")
    dispatch: str = Field(
        default="auto", description="rows to experts of other ranks: auto, local, all-to-all-nccl or all-to-all-gloo"
    )


class SimulatedSettings(BaseModel):
    """A simulated target and proposer instead of a model, for load on everything else (`seqmtp_serve/simulated.py`)."""

    model_config = _FROZEN
    step_ms: float = Field(default=25.0, ge=0, description="a target pass")
    row_ms: float = Field(default=0.0, ge=0, description="more for each of its rows")
    draft_ms: float = Field(default=1.0, ge=0, description="each position of a chain of drafts")
    acceptance: tuple[float, ...] = Field(default=(0.8, 0.7, 0.6), min_length=1, description="by position")


class SchedulerSettings(BaseModel):
    """The coordinator's batch and its clocks."""

    model_config = _FROZEN
    max_waiting: int = Field(default=256, ge=0, description="requests queued before 503")
    max_waiting_tokens: int = Field(
        default=262_144, ge=0, description="tokens that queued requests have to prefill, before 503; 0: no bound"
    )
    max_num_batched_tokens: int = Field(default=512, ge=1, description="token budget of one step")
    prefill_chunk: int = Field(default=256, ge=1, description="prompt tokens of one request in one step")
    cohorts: int = Field(default=1, ge=1, le=2, description="2: one half of the batch verifies while the other drafts")
    step_deadline_ms: float = Field(default=30_000.0, gt=0, description="a step that takes longer has failed")
    lease_s: float = Field(
        default=10.0, gt=0, description="ownership of a request lapses this long after its last commit"
    )
    reader_grace_s: float = Field(default=10.0, ge=0, description="a stream nobody reads is cancelled after this")


class StoreSettings(BaseModel):
    """The frontier store: a server by URL, or an embedded Valkey."""

    model_config = _FROZEN
    url: str | None = Field(default=None, description="redis://host:port/db or unix://path; default: embedded Valkey")
    password: SecretStr | None = Field(default=None, description="prefer password_file, or SEQMTP_STORE__PASSWORD")
    password_file: Path | None = Field(default=None, description="file whose first line is the password")
    durability: Literal["C1", "C2", "C3"] = Field(
        default="C1", description="C1 process crash, C2 host crash (AOF always), C3 fail-over (WAIT before publishing)"
    )
    wait_replicas: int = Field(default=1, ge=1, description="C3: replicas that must hold a row before it is published")
    wait_ms: int = Field(default=200, ge=1, description="C3: how long to wait for them")
    max_memory_mb: int | None = Field(
        default=None,
        ge=1,
        description="store memory above which no new request is taken; default: 9/10 of the server's own limit",
    )
    replay_window_s: float = Field(default=600.0, gt=0, description="a finished request stays readable this long")
    socket_timeout_s: float = Field(default=0.5, gt=0, description="one attempt")
    deadline_s: float = Field(default=5.0, gt=0, description="all attempts of one call")

    def resolved_password(self) -> str | None:
        """The password itself, from the file when one is named."""
        if self.password_file is not None:
            lines = self.password_file.read_text().splitlines()
            return lines[0].strip() if lines else None
        return None if self.password is None else self.password.get_secret_value()


class GatewaySettings(BaseModel):
    """The HTTP side."""

    model_config = _FROZEN
    host: str = Field(default="127.0.0.1", description="address to listen on; loopback unless said otherwise")
    port: int = Field(default=8000, ge=0, le=65535, description="0: any free port")
    api_key: SecretStr | None = Field(
        default=None, description="asked for on /v1; prefer api_key_file or the environment"
    )
    api_key_file: Path | None = Field(default=None, description="file of API keys, one a line (docs/threat-model.md)")
    allowed_origins: tuple[str, ...] = Field(default=(), description="CORS origins; none by default")
    reasoning_parser: Literal["auto", "none", "deepseek_r1"] = Field(
        default="auto",
        description="tells <think>…</think> from the answer; auto: where the chat template knows the tag",
    )

    def plain_api_key(self) -> str | None:
        """The single key of the environment; a file's are read by `services/gateway/keys.py`."""
        return None if self.api_key is None else self.api_key.get_secret_value()


class RpcSettings(BaseModel):
    """gRPC between the services. Port 0 takes a free one; peers find it in the registry."""

    model_config = _FROZEN
    host: str = Field(default="127.0.0.1", description="address to listen on")
    advertise_host: str | None = Field(default=None, description="address told to peers; default: host")
    target_port: int = Field(default=0, ge=0, le=65535)
    proposer_port: int = Field(default=0, ge=0, le=65535)
    coordinator_port: int = Field(default=0, ge=0, le=65535)
    tls_certificate: Path | None = Field(default=None, description="PEM chain of this process; default: plaintext")
    tls_key: Path | None = Field(default=None, description="its private key, PEM")
    tls_ca: Path | None = Field(default=None, description="PEM of the CA that peers' certificates must come from: mTLS")
    tls_server_name: str | None = Field(
        default=None, description="name in servers' certificates, when it is not the address dialled"
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> RpcSettings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        if self.tls_certificate is None and (self.tls_ca is not None or self.tls_server_name is not None):
            raise ValueError("tls_ca and tls_server_name need a certificate: without one gRPC is plaintext")
        return self

    @property
    def public_host(self) -> str:
        """What peers dial."""
        return self.advertise_host or self.host


class TelemetrySettings(BaseModel):
    """What is traced, once an exporter is named by OpenTelemetry's own OTEL_* variables."""

    model_config = _FROZEN
    round_sample_ratio: float = Field(
        default=0.0, ge=0, le=1, description="share of traced requests whose every round has spans of its own"
    )


class RegistrySettings(BaseModel):
    """Leased heartbeats by which the services find each other."""

    model_config = _FROZEN
    ttl_s: float = Field(default=3.0, gt=0, description="a worker silent for this long is gone")
    period_s: float = Field(default=1.0, gt=0, description="heartbeat and discovery period")


class Settings(BaseSettings):
    """The whole tree. The constructor is pure (tests, child processes): `load` adds environment and file."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix="SEQMTP_", env_nested_delimiter="__")
    model: ModelSettings = ModelSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    engine: EngineSettings = EngineSettings()
    kernels: KernelSettings = KernelSettings()
    simulated: SimulatedSettings | None = Field(default=None, description="no model at all: its costs are declared")
    scheduler: SchedulerSettings = SchedulerSettings()
    store: StoreSettings = StoreSettings()
    gateway: GatewaySettings = GatewaySettings()
    rpc: RpcSettings = RpcSettings()
    registry: RegistrySettings = RegistrySettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    data_dir: Path = Field(default=Path(".seqmtp"), description="embedded store and logs")
    drain_s: float = Field(
        default=5.0, ge=0, description="a worker asked to end lets its streams go on so long at most"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="what the logs hold")

    @property
    def wants_proposer_process(self) -> bool:
        """Whether drafts come from a process of its own."""
        speculation = self.speculation
        return speculation.num_speculative_tokens > 0 and speculation.proposer == "remote" and self.simulated is None

    @model_validator(mode="after")
    def _heartbeat_beats_ttl(self) -> Settings:
        if self.registry.period_s * 2 > self.registry.ttl_s:
            raise ValueError("registry.ttl_s must be at least twice registry.period_s: a slow beat is no death")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    def secrets(self) -> tuple[str, ...]:
        """What must not appear in a log: passwords and keys, those with it that the named files hold now."""
        found = [self.store.password, self.gateway.api_key]
        held = [
            _first_words(file) for file in (self.store.password_file, self.gateway.api_key_file) if file is not None
        ]
        return (*(secret.get_secret_value() for secret in found if secret is not None), *chain.from_iterable(held))

    def to_json(self) -> str:
        """The whole tree with its secrets in clear: for a child process's private file, never for a log."""
        return json.dumps(_plain(self.model_dump()))


def _first_words(file: Path) -> list[str]:
    """Of each line; none of a file that cannot be read: whoever needs it says so."""
    try:
        return [words[0] for line in file.read_text().splitlines() if (words := line.split("#", 1)[0].split())]
    except OSError:
        return []


def from_json(text: str) -> Settings:
    """Inverse of `Settings.to_json`; reads nothing else."""
    return Settings(**json.loads(text))


def _plain(value: Any) -> Any:
    """JSON values for models' dumps, secrets in clear."""
    match value:
        case SecretStr():
            return value.get_secret_value()
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case Path():
            return str(value)
        case _:
            return value

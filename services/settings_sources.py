"""Where the settings come from. No other file reads the environment for them.

Strongest first: flags, `SEQMTP_*` variables (`SEQMTP_ENGINE__MAX_MODEL_LEN=1024`), a YAML file (`--config FILE`), what
a GPU needs, what a built-in model brings (`services/builtin_models.py`), the defaults of `services/settings.py`. Flags
are vLLM's words where vLLM has one (`services/flags.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from seqmtp_serve.errors import InvalidField
from services.builtin_models import builtin_model
from services.settings import ModelSettings, Settings

FAULT_POINTS = "SEQMTP_FAULT_POINTS"


def load(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Build the tree from `flags` (nested, only what was given), the environment and the YAML file `config`, over what
    the device needs and the model, if it is a built-in one, brings.

    Raises InvalidField naming every setting that is unknown or out of range.
    """
    document: Any = {}
    if config is not None:
        try:
            document = yaml.safe_load(config.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise InvalidField(f"cannot read settings from {config}: {error}", param="config") from error
        if not isinstance(document, dict):
            raise InvalidField(f"{config} must hold a mapping of settings", param="config")
    try:
        said = _merged(_merged(document, EnvSettingsSource(Settings)()), flags)
        below = _merged(builtin_model(_model_path(said)).settings, _for_device(said))
        return Settings(**_merged(below, said))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])) or 'settings'}: {item['msg']}" for item in error.errors()]
        raise InvalidField("; ".join(problems), param=problems[0].split(":")[0]) from None


def fault_rig() -> Path | None:
    """The folder of the fault rig that started this process (`services/fault_points.py`). None in any service."""
    named = os.environ.get(FAULT_POINTS)
    return Path(named) if named else None


def _model_path(tree: Mapping[str, Any]) -> str:
    """Which model a tree that is not validated yet asks for."""
    model = tree.get("model")
    said = model.get("path") if isinstance(model, Mapping) else None
    return str(said or ModelSettings().path)


def _for_device(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is else with a device that is no CPU; `config.EngineConfig` refuses the defaults there."""
    engine = tree.get("engine")
    device = engine.get("device") if isinstance(engine, Mapping) else None
    is_gpu = isinstance(device, str) and device.startswith("cuda")
    return {"engine": {"weights": "bf16", "numerics": "fast"}} if is_gpu else {}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mapping by mapping."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged

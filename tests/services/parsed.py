"""A command line as `seqmtp serve` reads it."""

from __future__ import annotations

import argparse

from services.flags import add_flags, settings_from
from services.settings import Settings


def parse(*argv: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return settings_from(parser.parse_args(argv))

"""`seqmtp serve MODEL`: the whole service on this machine, on a local Ray, or with `--no-ray` as plain processes."""

from __future__ import annotations

import argparse
import asyncio

from seqmtp_serve.checkpoint.locate import locate
from services.core_config import engine_config, proposer_config
from services.flags import add_flags, settings_from
from services.settings import Settings

EXAMPLES = """examples:
  seqmtp serve                                            the shipped chat model, on a local Ray
  seqmtp serve --no-ray --port 9000                       as plain processes, on another port
  seqmtp serve v3-tiny                                    the shipped DeepSeek-V3-layout code model, on two ranks
  seqmtp serve ./DeepSeek-model --target-ranks 2          a folder of released files, experts shared by two ranks
  seqmtp serve --speculative-config '{"num_speculative_tokens": 0}'    ordinary decoding"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model and settings flags, and where the services run."""
    add_flags(parser)
    parser.add_argument("--no-ray", action="store_true", help="plain processes: less memory, a faster start")
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C, SIGTERM or a hang-up; stops all it started, and that alone. Raises what keeps it from it."""
    settings = settings_from(args)
    check_devices(settings)
    locate(settings.model.path)  # a model that is not there is said before anything is started
    if args.no_ray:
        from services.processes import serve_processes

        return asyncio.run(serve_processes(settings))
    from services.ray_service import serve_on_ray

    return serve_on_ray(settings)


def check_devices(settings: Settings) -> None:
    """Raises InvalidField for a device that this machine does not have, or that cannot do what is asked of it."""
    for device in {engine_config(settings).device, proposer_config(settings).device} - {"cpu"}:
        from seqmtp_serve.model.device import usable_device  # torch: seconds, for those alone who asked for a GPU

        usable_device(device)

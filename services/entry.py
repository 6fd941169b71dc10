"""The command line of one service as a plain process: settings, logging, signals, one event loop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from seqmtp_serve.errors import CallerError, CheckpointError, SeqMTPError
from services.flags import add_flags, settings_from
from services.redact import RedactingFormatter
from services.settings import Settings

Run = Callable[[Settings, asyncio.Event], Coroutine[Any, Any, None]]

EXIT_FAULT = 1
EXIT_BAD_SETTINGS = 2  # argparse says so
EXIT_NO_RETRY = 3  # the checkpoint or a setting is wrong: a new start would fail the same way


def main(name: str, run: Run) -> None:
    """Run `run(settings, stop)` until it returns; SIGTERM and SIGINT set `stop`. For exit codes see above."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{name}")
    add_flags(parser)
    try:
        settings = settings_from(parser.parse_args())
    except SeqMTPError as error:
        parser.error(str(error))
    try:
        set_up_process(name, settings)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_until_signal(run, settings))
    except SeqMTPError as error:
        logging.getLogger(name).error("%s: %s", error.code, error)
        sys.exit(EXIT_NO_RETRY if isinstance(error, CheckpointError | CallerError) else EXIT_FAULT)


def set_up_process(name: str, settings: Settings) -> None:
    """Logging, one line a record on stderr, without secrets; and TLS for gRPC. Raises InvalidField."""
    handler = logging.StreamHandler()
    form = f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(RedactingFormatter(form, settings.secrets()))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    if settings.rpc.tls_certificate is not None:
        from services.rpc.tls import secure  # gRPC, which the launcher does without

        secure(settings.rpc)


async def _until_signal(run: Run, settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run(settings, stop)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed: it is optional, and faster."""
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None

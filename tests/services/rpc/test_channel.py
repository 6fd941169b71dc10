"""gRPC is set up before it begins: it reads its environment once."""

import os
import subprocess
import sys

import pytest

OPEN_BOTH = """
import asyncio, os
from services.rpc import channel

async def main():
    server = channel.new_server()
    address = channel.bind(server, "127.0.0.1", 0)
    await server.start()
    async with channel.connect(address) as link:
        await link.channel_ready()
    await server.stop(None)

asyncio.run(main())
print(os.environ["GRPC_EXPERIMENTS"])
"""


def experiments(**environment: str) -> tuple[str, str]:
    """What gRPC is told in a fresh process, and what it says to that."""
    inherited = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    ended = subprocess.run(
        [sys.executable, "-c", OPEN_BOTH],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ended.stdout.strip(), ended.stderr


@pytest.mark.parametrize("name", ["event_engine_client", "event_engine_listener", "event_engine_callback_cq"])
def test_this_grpc_knows_what_it_is_told_to_leave_out(name: str) -> None:
    told, said = experiments()
    assert f"-{name}" in told.split(",")
    assert "Unknown experiment" not in said


def test_an_unknown_name_would_be_noticed_and_the_environment_goes_first() -> None:
    told, said = experiments(GRPC_EXPERIMENTS="-no_such_thing")
    assert told == "-no_such_thing"
    assert "Unknown experiment: no_such_thing" in said

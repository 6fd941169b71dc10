"""A process that forwards one port of its network namespace to the same port on the loopback there.

    python -m tests.chaos.rig.relay HOST PORT

Workers that wait at fault points listen on loopback only (`services/fault_points.py`): this is how peers reach them.
"""

from __future__ import annotations

import asyncio
import sys

from tests.chaos.rig.proxy import Proxy


async def main(host: str, port: int) -> None:
    """Until killed."""
    await Proxy((host, port), ("127.0.0.1", port)).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))

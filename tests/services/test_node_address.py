"""A replica that may be on any node tells its peers an address that they can dial."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import pytest

from services import app
from services.node_address import on_node
from services.settings import RpcSettings, Settings, StoreSettings

NODE = "10.1.2.3"


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_wildcard_becomes_the_nodes_address(wildcard: str) -> None:
    settings = on_node(Settings(rpc=RpcSettings(host=wildcard, target_port=50051)), NODE)
    assert (settings.rpc.host, settings.rpc.public_host, settings.rpc.target_port) == (NODE, NODE, 50051)


@pytest.mark.parametrize("rpc", [RpcSettings(), RpcSettings(host="0.0.0.0", advertise_host="target.example")])
def test_what_was_said_stays(rpc: RpcSettings) -> None:
    assert on_node(Settings(rpc=rpc), NODE).rpc == rpc


class _Replica(app.Worker):
    def __del__(self) -> None:  # type: ignore[override]
        """Serve awaits the other one; Python, which calls this one, cannot."""


async def test_a_replica_serves_at_its_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []

    async def run(settings: Settings, stop: asyncio.Event) -> None:
        served.append(settings)
        await stop.wait()

    role = ModuleType("fake.target.main")
    role.run = run  # type: ignore[attr-defined]
    for name, module in {
        "fake": ModuleType("fake"),
        "fake.target": ModuleType("fake.target"),
        role.__name__: role,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(app, "get_node_ip_address", lambda: NODE)
    monkeypatch.setattr(app, "FAILS_WITHIN_S", 0.01)
    monkeypatch.setattr(app, "set_up_process", lambda role, tree: None)  # the log is this whole process's
    worker = object.__new__(_Replica)
    settings = Settings(
        rpc=RpcSettings(host="0.0.0.0", coordinator_port=50053), store=StoreSettings(url="redis://127.0.0.1:1")
    )
    await worker.__init__("target", "fake", settings.to_json())  # type: ignore[misc]
    await app.Worker.__del__(worker)
    assert [each.rpc for each in served] == [RpcSettings(host=NODE, coordinator_port=50053)]

"""A replica that may be on any node tells its peers an address that they can dial."""

from __future__ import annotations

import pytest

from services.node_address import on_node
from services.settings import RpcSettings, Settings

NODE = "10.1.2.3"


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_wildcard_becomes_the_nodes_address(wildcard: str) -> None:
    settings = on_node(Settings(rpc=RpcSettings(host=wildcard, target_port=50051)), NODE)
    assert (settings.rpc.host, settings.rpc.public_host, settings.rpc.target_port) == (NODE, NODE, 50051)


@pytest.mark.parametrize("rpc", [RpcSettings(), RpcSettings(host="0.0.0.0", advertise_host="target.example")])
def test_what_was_said_stays(rpc: RpcSettings) -> None:
    assert on_node(Settings(rpc=rpc), NODE).rpc == rpc

"""Where a replica listens when it was only told to listen: on its node's own address, which its peers can dial."""

from __future__ import annotations

from services.settings import Settings

WILDCARDS = frozenset({"0.0.0.0", "::"})


def on_node(settings: Settings, address: str) -> Settings:
    """The settings as a replica on the node at `address` uses them.

    A wildcard says "every address of this machine" to a listener, and nothing to a peer that reads it in the registry:
    `rpc.host` becomes the node's address. Any other host, and an `advertise_host`, stay as they are.
    """
    rpc = settings.rpc
    if rpc.host not in WILDCARDS or rpc.advertise_host is not None:
        return settings
    return settings.model_copy(update={"rpc": rpc.model_copy(update={"host": address})})

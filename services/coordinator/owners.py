"""Whether a request's owner is still at work: asked before its record is taken over.

Nothing depends on the answer being right. A record taken from a living owner fences it, and costs a replay; one left to
a dead owner costs a pause.
"""

from __future__ import annotations

import grpc

from seqmtp_serve.errors import StoreUnreachable
from seqmtp_serve.frontier.round_notes import RoundNote
from services.registry import Registry
from services.rpc.channel import connect
from services.rpc.wire import coordinator, coordinator_rpc
from services.store.notes import unpack_notes
from services.store.records import Unfinished

PROBE_TIMEOUT_S = 0.5  # a coordinator answers this from memory; to be wrong costs a replay


class Owners:
    """The other coordinators, as `me` sees them."""

    def __init__(self, me: str, registry: Registry, *, lease_s: float) -> None:
        self._me, self._registry, self._lease_s = me, registry, lease_s

    async def registered(self) -> set[str]:
        """The other coordinators that announce themselves. Raises StoreUnreachable."""
        return {peer.id for peer in await self._registry.list("coordinator")} - {self._me}

    async def gone(self, record: Unfinished) -> bool:
        """True when nobody is generating a request that is not live here.

        Its owner is not registered, does not answer, or says that it let go; or its lease lapsed a whole lease ago,
        whatever its owner says. False while the registry does not answer.
        """
        if record.owner == self._me or record.lease_left_s < -self._lease_s:
            return True
        try:
            addresses = {peer.id: peer.address for peer in await self._registry.list("coordinator")}
        except StoreUnreachable:
            return False
        address = addresses.get(record.owner)
        return address is None or not await self._owns(address, record.request_id)

    async def notes(self, owner: str, request_id: str) -> tuple[RoundNote, ...]:
        """What the request's owner has in memory of its rounds; nothing of one that is gone, or is this one itself."""
        if owner == self._me:
            return ()
        try:
            addresses = {peer.id: peer.address for peer in await self._registry.list("coordinator")}
        except StoreUnreachable:
            return ()
        if owner not in addresses:
            return ()
        async with connect(addresses[owner]) as channel:
            stub = coordinator_rpc.CoordinatorStub(channel)
            try:
                reply = await stub.Notes(coordinator.LookupRequest(request_id=request_id), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return ()
        return unpack_notes(reply)

    async def _owns(self, address: str, request_id: str) -> bool:
        async with connect(address) as channel:
            stub = coordinator_rpc.CoordinatorStub(channel)
            try:
                reply = await stub.Owns(coordinator.OwnsRequest(request_id=request_id), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return False
        return bool(reply.live)

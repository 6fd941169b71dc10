"""A client that wants one text: it asks a coordinator, and another when that one is lost, refuses or is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from seqmtp_serve.errors import ProtocolError, SeqMTPError
from seqmtp_serve.fake import fake_text
from seqmtp_serve.frontier.row_chain import RowChain
from seqmtp_serve.request import CommittedRow, FinishReason, Request
from tests.chaos.history import Broken, ClientEvent, Ended, Invoked, Received
from tests.chaos.simulation.coordinator import SimCoordinator
from tests.chaos.simulation.network import Network
from tests.chaos.simulation.row_link import RowLink

AGAIN_S = 0.02
PATIENCE_S = 30.0


class SimClient:
    """Refuses rows that do not follow and passes over those it has, as the gateway does; it shows every other to the
    history as it comes.
    """

    def __init__(
        self,
        request: Request,
        network: Network,
        link: RowLink,
        coordinators: Callable[[], Sequence[SimCoordinator]],
        events: list[ClientEvent],
        log_len: Callable[[], int],
    ) -> None:
        self._request, self._network, self._link, self._coordinators = request, network, link, coordinators
        self._events, self._log_len = events, log_len
        self._seen = 0
        self._finish: FinishReason | None = None
        self._reading: asyncio.Future[None] | None = None

    def leave_for_another(self) -> None:
        """Give the present connection up, wherever it is; the coordinator behind it may live on."""
        if self._reading is not None:
            self._reading.cancel()

    async def run(self) -> None:
        """Until the text is complete, or patience ends."""
        loop = asyncio.get_running_loop()
        stream = self._request.request_id
        reference = fake_text(self._request)
        self._events.append(Invoked(stream=stream, request_id=stream, at=loop.time(), reference=reference))
        give_up_at = loop.time() + PATIENCE_S
        while self._finish is None and loop.time() < give_up_at:
            reason = await self._connect()
            if self._finish is None:
                self._events.append(Broken(stream=stream, at=loop.time(), reason=reason))
                await asyncio.sleep(AGAIN_S + self._network.delay_s())
        how = None if self._finish is None else self._finish.value
        self._events.append(Ended(stream=stream, at=loop.time(), finish=how, detail="patience is over"))

    async def _connect(self) -> str:
        """Read from one coordinator. Returns why it ended."""
        coordinator = self._network.rng.choice(self._coordinators())
        self._reading = self._connected(coordinator)
        try:
            await self._reading
        except asyncio.CancelledError:
            return "the connection was lost"
        except SeqMTPError as error:
            return error.code
        finally:
            self._reading = None
        return "the stream ended early"

    def _connected(self, coordinator: SimCoordinator) -> asyncio.Future[None]:
        """A reading that ends when the coordinator does."""
        return asyncio.ensure_future(coordinator.while_alive(self._read(coordinator)))

    async def _read(self, coordinator: SimCoordinator) -> None:
        await asyncio.sleep(self._network.delay_s())
        chain = RowChain(self._request)
        async with aclosing(self._rows(coordinator)) as rows:
            async for row in self._link.carry(rows):
                await asyncio.sleep(self._network.delay_s())
                self._check(chain, row)
                if row.version > self._seen:
                    self._take(row)
                if row.finish is not None:
                    self._finish = row.finish
                    return

    async def _rows(self, coordinator: SimCoordinator) -> AsyncGenerator[CommittedRow, None]:
        """As the coordinator gives them."""
        async for row in await coordinator.driver.submit(self._request):
            yield row

    def _check(self, chain: RowChain, row: CommittedRow) -> None:
        """Raises ProtocolError, which ends the connection."""
        try:
            chain.take(row)
        except ProtocolError:
            self._link.num_refused += 1
            raise

    def _take(self, row: CommittedRow) -> None:
        self._seen = row.version
        self._events.append(
            Received(
                stream=self._request.request_id,
                version=row.version,
                tokens=row.tokens,
                at=asyncio.get_running_loop().time(),
                log_len=self._log_len(),
            )
        )

"""One-sided transfers as a transport: which nodes it reaches, and the memory that it keeps for them."""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import Final

from kvstrata.proto.logs import get_logger
from kvstrata.transfer.base import Endpoint
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.rdma.client_rails import ClientRails
from kvstrata.transfer.rdma.peer import RdmaPeer
from kvstrata.transfer.rdma.rails import RailOptions
from kvstrata.transfer.regions import Region
from kvstrata.transfer.tcp import TcpTransport

log = get_logger(__name__)

#: What unregistering waits for reads into the region that were given up.
SETTLE_S: Final = 1.0


class RdmaTransport:
    """Reaches every node when this host has rails; whether a node has them shows when it is first used.

    ``only``: it reaches nodes in any case, and what cannot go over rails is lost, not sent another way.
    """

    name = "rdma"

    def __init__(self, identity: Identity, options: RailOptions, *, only: bool, own: ClientRails | None = None) -> None:
        self._only = only
        self._boot_id = boot_id()
        self._tcp = TcpTransport(identity)
        self._own = own or ClientRails(identity.name, options)
        self._peers: weakref.WeakSet[RdmaPeer] = weakref.WeakSet()
        self._leaving: dict[int, Region] = {}  # unregistered by its owner, not by our agent
        if only:
            self._own.warm_up()

    def reaches(self, endpoint: Endpoint) -> bool:
        if self._only:
            return bool(endpoint.channel)
        kind = self._own.rails().kind
        near = kind != "cma" or endpoint.boot_id == self._boot_id
        return bool(kind) and near and bool(endpoint.channel)

    def connect(self, endpoint: Endpoint) -> RdmaPeer:
        self._own.warm_up()
        for region in list(self._leaving.values()):
            region.holders.look()  # this peer may come in place of one that held it, and is gone
        peer = RdmaPeer(self._tcp.connect(endpoint), self._own, only=self._only)
        self._peers.add(peer)
        return peer

    def register(self, region: Region) -> None:
        """Our agent knows it from now on, if it is open; each node is told when a store first names it."""
        self._own.register(region)

    def unregister(self, region: Region) -> None:
        """Have everybody forget it. Takes a second a node that may be reading it, and for reads into it, at most.

        What has not settled then keeps the memory alive, and registered where a node may read it, until it has: that is
        logged, and in health.
        """
        peers = list(self._peers)
        self._leaving[region.id] = region
        try:
            held = [peer for peer in peers if not peer.forget(region)]
            until = time.monotonic() + SETTLE_S
            open_reads = [one for peer in peers for one in peer.unsettled(region) if not one.wait(until)]
        finally:
            region.holders.when_none(partial(self._let_go, region))
        if held or open_reads:
            log.warning(
                "unregistered memory stays: transfers that name it have not settled",
                nbytes=region.nbytes,
                reads=len(open_reads),
                nodes=[peer.endpoint.node_id for peer in held],
            )

    def _let_go(self, region: Region) -> None:
        self._leaving.pop(region.id, None)
        self._own.forget(region)

    def rail_health(self) -> dict[str, object]:
        """See :meth:`ClientRails.health`; ``unsettled`` reads that nobody waits for."""
        peers = list(self._peers)
        return {**self._own.health(), "given_up": sum(len(peer.unsettled()) for peer in peers)}

    def close(self) -> None:
        """End the agent: reads that have not settled get a bounded time, and keep their memory if they do not."""
        self._peers.clear()
        self._own.close()
        self._leaving.clear()
        self._tcp.close()

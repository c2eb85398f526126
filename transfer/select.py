"""Which transport reaches which node: the choice, and the spelling users give it.

``auto``: shm when the node runs on this boot and its socket is visible, else rdma where this host has an RDMA device
and the node has rails, else tcp. ``shm``, ``tcp`` or ``rdma`` force one; ``rdma-cma`` is rdma between processes of one
host, without a device. Device memory that a transport does not reach is staged. ``+faults:NAME=VALUE,...`` after any
of them puts the fault-injecting transport in front.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.transfer.base import Endpoint, Peer, Transport
from kvstrata.transfer.faults import Faults, FaultyTransport
from kvstrata.transfer.gpu.staging import StagedPeer, Staging
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.rdma.rails import RailMode, RailOptions
from kvstrata.transfer.rdma.transport import RdmaTransport
from kvstrata.transfer.regions import Region
from kvstrata.transfer.shm import ShmTransport
from kvstrata.transfer.tcp import TcpTransport

CHOICES: Final = ("auto", "shm", "tcp", "rdma", "rdma-cma")
_RAILS: Final = {"auto": RailMode.AUTO, "rdma": RailMode.ON, "rdma-cma": RailMode.CMA}


def rail_options(mode: RailMode, environment: Mapping[str, str] = os.environ) -> RailOptions:
    """What an engine's operator has set; cma is UCX's alone, and names no device."""
    if mode is RailMode.CMA:
        return RailOptions(mode)
    devices = environment.get("KVSTRATA_RDMA_DEVICES", "")
    named = tuple(name.strip() for name in devices.split(",") if name.strip())
    return RailOptions(mode, environment.get("KVSTRATA_RDMA_BACKEND") or "UCX", named)


class TransportChoice:
    """The transports of one client, in order of preference."""

    def __init__(self, spec: str, identity: Identity) -> None:
        name, plus, faults = spec.partition("+faults:")
        if name not in CHOICES:
            raise InvalidArgument(f"transport {spec!r} is unknown: choose one of {', '.join(CHOICES)}")
        self.spec = spec
        self._transports: list[Transport] = []
        if name in ("auto", "shm"):
            self._transports.append(ShmTransport(identity))
        self._rdma: RdmaTransport | None = None
        if name in _RAILS:
            self._rdma = RdmaTransport(identity, rail_options(_RAILS[name]), only=name != "auto")
            self._transports.append(self._rdma)
        if name in ("auto", "tcp"):
            self._transports.append(TcpTransport(identity))
        if plus:
            parsed = Faults.parse(faults)
            self._transports = [FaultyTransport(inner, parsed) for inner in self._transports]
        self.staging = Staging(self.register, self.unregister)

    def connect(self, endpoint: Endpoint) -> Peer:
        """A peer over the first transport that reaches the node; no byte is sent yet.

        Raises :class:`Unavailable` when none does (``shm`` was forced and the node is elsewhere).
        """
        for transport in self._transports:
            if transport.reaches(endpoint):
                return StagedPeer(transport.connect(endpoint), self.staging)
        raise Unavailable(f"no transport of {self.spec!r} reaches node {endpoint.node_id} at {endpoint.channel}")

    def register(self, region: Region) -> None:
        for transport in self._transports:
            transport.register(region)

    def unregister(self, region: Region) -> None:
        for transport in self._transports:
            transport.unregister(region)

    def rail_health(self) -> dict[str, object]:
        """What this client has to reach nodes one-sidedly, see :meth:`RdmaTransport.rail_health`; or empty."""
        return self._rdma.rail_health() if self._rdma is not None else {}

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        self.staging.close()

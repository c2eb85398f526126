"""Which transport reaches which node: the choice, and the spelling users give it.

``auto``: shm when the node runs on this boot and its socket is visible, else tcp. ``shm`` or ``tcp``
force one. ``+faults:NAME=VALUE,...`` after any of them puts the fault-injecting transport in front.
"""

from __future__ import annotations

from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.transfer.base import Endpoint, Peer, Transport
from kvstrata.transfer.faults import Faults, FaultyTransport
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.regions import Region
from kvstrata.transfer.shm import ShmTransport
from kvstrata.transfer.tcp import TcpTransport

CHOICES = ("auto", "shm", "tcp")


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
        if name in ("auto", "tcp"):
            self._transports.append(TcpTransport(identity))
        if plus:
            parsed = Faults.parse(faults)
            self._transports = [FaultyTransport(inner, parsed) for inner in self._transports]

    def connect(self, endpoint: Endpoint) -> Peer:
        """A peer over the first transport that reaches the node; no byte is sent yet.

        Raises :class:`Unavailable` when none does (``shm`` was forced and the node is elsewhere).
        """
        for transport in self._transports:
            if transport.reaches(endpoint):
                return transport.connect(endpoint)
        raise Unavailable(f"no transport of {self.spec!r} reaches node {endpoint.node_id} at {endpoint.channel}")

    def register(self, region: Region) -> None:
        for transport in self._transports:
            transport.register(region)

    def unregister(self, region: Region) -> None:
        for transport in self._transports:
            transport.unregister(region)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

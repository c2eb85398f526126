"""Who connects, from where, to what address: what every hello says."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.security.tickets import NONCE_BYTES, TicketSource

VERSION: Final = "0.1.0"
SOFTWARE: Final = f"kvstrata {VERSION}"
UNIX_PREFIX: Final = "unix:"
#: Hosts that an endpoint listens on, and nobody can connect to.
WILDCARDS: Final = ("0.0.0.0", "[::]")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who connects: goes into every Hello. ``session`` is 16 random bytes for one client process."""

    session: bytes
    role: str = "client"
    name: str = ""
    tickets: TicketSource | None = None  #: what to prove on each connection; None: nothing

    @classmethod
    def new(cls, role: str = "client", name: str = "", tickets: TicketSource | None = None) -> Identity:
        return cls(os.urandom(16), role, name or f"{socket.gethostname()}:{os.getpid()}", tickets)

    def hello(self) -> pb.Hello:
        return pb.Hello(
            protocol=wire.PROTOCOL,
            protocol_min=wire.PROTOCOL_MIN,
            software=SOFTWARE,
            role=self.role,
            session=self.session,
            name=self.name,
            host=socket.gethostname(),
            boot_id=boot_id(),
            pid=os.getpid(),
            nonce=os.urandom(NONCE_BYTES),
        )


def boot_id() -> str:
    """This machine's boot id: two processes with the same one share a kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """``HOST:PORT``, ``[v6]:PORT`` or ``unix:PATH``; raises :class:`InvalidArgument`."""
    if address.startswith(UNIX_PREFIX):
        return socket.AF_UNIX, address[len(UNIX_PREFIX) :]
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"address {address!r} is not HOST:PORT or unix:PATH")
    host = host.removeprefix("[").removesuffix("]")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))


def host_of(address: str) -> str:
    """The host of ``HOST:PORT``, without brackets; "" of a Unix socket."""
    if address.startswith(UNIX_PREFIX):
        return ""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def is_loopback(address: str) -> bool:
    """Whether only this host reaches ``HOST:PORT``, or a Unix socket; nothing is resolved."""
    if address.startswith(UNIX_PREFIX):
        return True
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def named_host(address: str, endpoint: str) -> str:
    """The host that a certificate at ``endpoint`` has to name: that of ``address``, which the caller was given, not one
    that an unproved hello named. By a Unix socket there is none but the endpoint's."""
    return host_of(endpoint if address.startswith(UNIX_PREFIX) else address)


def advertised(endpoint: str, host: str) -> str:
    """An endpoint bound to a wildcard, as the host by which a peer was reached; others, or without one, as they are."""
    bound, _, port = endpoint.rpartition(":")
    if bound not in WILDCARDS or not host:
        return endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

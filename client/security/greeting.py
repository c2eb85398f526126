"""A master's hello, before anything is proved: it tells where HTTP and gRPC are served, and nothing in it is proof."""

from __future__ import annotations

from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity

GREET_S: Final = 1.0


def greet(address: str, role: str = "client") -> pb.HelloOk:
    """Raises :class:`Unavailable`, :class:`InvalidArgument` when it is no master."""
    try:
        identity = Identity.new(role)
        connection = Connection.open(address, identity, connect_s=GREET_S, silence_s=GREET_S, hello_only=True)
    except Unavailable as error:
        raise Unavailable(f"no master at {address}: {error}. Is it running, and is this its channel?") from error
    connection.close()
    hello = connection.hello
    if hello.role != "master":
        raise InvalidArgument(f"{address} is a {hello.role or 'stranger'}, not a master: give a master's channel")
    return hello

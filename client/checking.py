"""Asks a storage node to check itself, over its channel."""

from __future__ import annotations

import json
import time
from typing import Any, Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ProtocolError
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.security.tickets import TicketSource

#: The node ends its check by the deadline; its answer may take this much longer.
ANSWER_S: Final = 5.0
#: A node that checks itself sends progress each 100 ms, unless the machine is very busy.
SILENCE_S: Final = 2.0
CONNECT_S: Final = 1.0


def check_node(
    address: str,
    *,
    scrub: bool = False,
    scrub_bytes: int = 0,
    bytes_per_second: int = 0,
    seconds: float = 60.0,
    tickets: TicketSource | None = None,
) -> dict[str, Any]:
    """Have the node at a channel ``address`` assert its invariants; what it says, as docs/operations.md tells.

    ``scrub`` reads blocks back, too: at most ``scrub_bytes`` of each tier (0: all), at ``bytes_per_second`` (0: the
    node's own bound). It ends within ``seconds``, done or not. ``tickets``: what to prove there. Raises
    :class:`Unavailable` when the node does not answer, :class:`Busy` when it is being checked already,
    :class:`Refused` when it does not know the call.
    """
    message = pb.NodeCheck(
        scrub=scrub,
        scrub_bytes=scrub_bytes,
        bytes_per_second=bytes_per_second,
        deadline_ms=max(1, int(seconds * 1e3)),
    )
    identity = Identity.new("admin", tickets=tickets)
    connection = Connection.open(address, identity, silence_s=SILENCE_S, connect_s=CONNECT_S)
    try:
        frame = connection.call(Kind.NODE_CHECK, message.SerializeToString(), time.monotonic() + seconds + ANSWER_S)
        told = json.loads(expect(pb.NodeCheckOk, frame, Kind.NODE_CHECK_OK).json)
    except json.JSONDecodeError as error:
        raise ProtocolError(f"{address} answered a check with something that is not JSON") from error
    finally:
        connection.close()
    if not isinstance(told, dict):
        raise ProtocolError(f"{address} answered a check with a {type(told).__name__}")
    return told

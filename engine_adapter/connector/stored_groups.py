"""Under which names an engine's ranks store, asked by its scheduler: an engine may tell it less of the KV than them."""

from __future__ import annotations

import msgspec
import zmq

from kvstrata.engine_adapter.connector.lookup_messages import LOOKUP_BYTES_MAX, LookupAnswer, LookupAsk
from kvstrata.proto.errors import ProtocolError, Unavailable

_ASK = msgspec.msgpack.encode(LookupAsk(lookup_id=0, cache_salt="", hashes=[], groups=True))


def stored_groups(endpoint: str, timeout_s: float) -> list[str]:
    """Namespace groups of all that the ranks pool, as rank 0 says at its lookup ``endpoint``. Waits for it.

    Raises :class:`Unavailable` when it does not say within ``timeout_s``, :class:`ProtocolError` for what is no answer.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, LOOKUP_BYTES_MAX)
        socket.connect(endpoint)
        socket.send(_ASK)
        if not socket.poll(int(timeout_s * 1e3)):
            raise Unavailable(f"rank 0 has not said within {timeout_s:g} s under which names this engine stores")
        frames = socket.recv_multipart(zmq.NOBLOCK)
    try:
        answer = msgspec.msgpack.decode(frames[0] if len(frames) == 1 else b"", type=LookupAnswer)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no answer of a lookup server: {error}") from error
    if not answer.answered or not answer.groups:
        raise Unavailable("rank 0 cannot say under which names this engine stores")
    return answer.groups

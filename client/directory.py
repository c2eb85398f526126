"""Calls to the directory, and its answers as arrays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TypeVar

from google.protobuf.message import Message

from kvstrata.client.locations import Located, Placed, decode_lookup, decode_place, join_located, join_placed
from kvstrata.client.masters import Master, Masters
from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.plan import pieces_of
from kvstrata.client.results import RemoveResult
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, KVError, ProtocolError, Unauthenticated, Unavailable
from kvstrata.proto.keys import HASHES_MAX
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Endpoint
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.tracing import TRACING, SpanKind

log = get_logger(__name__)

#: Nodes that one question asks to avoid, at most.
AVOID_MAX: Final = 64
#: A miss report waits for a free connection no longer than this.
REPORT_S: Final = 0.1

M = TypeVar("M", bound=Message)


class Directory:
    """Calls to the masters: lookups to whichever answers, changes to the one that leads. Thread-safe."""

    def __init__(self, addresses: Sequence[str], identity: Identity) -> None:
        self.masters = Masters(addresses, identity)

    def greet(self, deadline: float) -> None:
        """Say hello to the first master that answers before ``deadline``, so that this client is known.

        Unreachable ones are left for later; raises the refusal of a master that answers, and
        :class:`Unauthenticated` when none lets this client in, but one would not.
        """
        refusal: Unauthenticated | None = None
        for master in self.masters:
            try:
                with suppress(Unavailable, Busy):
                    master.greet(deadline)
                    return
            except Unauthenticated as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def open(self, namespace: PoolNamespace, deadline: float) -> None:
        """Learn the namespace's weight epoch, if a master can be asked; raises its refusal. Nonsense is no answer."""
        refusal: Unauthenticated | None = None
        for master in self.masters:
            try:
                with suppress(Unavailable, Busy, ProtocolError):
                    master.process.handle(namespace, deadline)
                    return
            except Unauthenticated as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def lookup(
        self,
        namespace: PoolNamespace,
        salt: str,
        packed: bytes,
        deadline: float,
        request: str = "",
        avoid: Sequence[Endpoint] = (),
    ) -> Located:
        """``request``: the engine's name of the request that asks, for the master's log of lookups.
        ``avoid``: nodes that are not to be named for a block which another node has, at most ``AVOID_MAX``.

        A master that is still being told what the nodes hold is asked last.
        Raises :class:`Unavailable` (:class:`Late` when time ran out), or the refusal of the call."""

        def ask(piece: bytes) -> Located:
            message = pb.Lookup(salt=salt, hashes=piece, request=request)
            if avoid:
                message.avoid.extend(node.node_id for node in avoid)
                message.avoid_incarnation.extend(node.incarnation for node in avoid)
            if TRACING.on:
                message.trace = TRACING.here()

            def build(handle: int) -> Message:
                message.ns, message.epoch = handle, namespace.epoch
                return message

            def located(master: Master) -> Located:
                reply = _decoded(pb.LookupOk, master.ask(namespace, deadline, Kind.LOOKUP, build))
                return decode_lookup(reply, len(piece) // namespace.hash_bytes)

            return self.masters.any(located, _knows)

        pieces = _split(packed, namespace.hash_bytes)
        if not TRACING.on:
            return ask(pieces[0]) if len(pieces) == 1 else join_located([ask(piece) for piece in pieces])
        with TRACING.span("kvstrata.directory.lookup", kind=SpanKind.CLIENT):
            return join_located([ask(piece) for piece in pieces])

    def place(
        self,
        namespace: PoolNamespace,
        salt: str,
        packed: bytes,
        boot_id: str,
        deadline: float,
        avoid: Sequence[Endpoint] = (),
        unasked: bytes = b"",
    ) -> Placed:
        """Where to store; ``avoid`` and errors as for :meth:`lookup`. ``unasked``: packed hashes of what went to a sole
        node without a question, ``HASHES_MAX`` at most."""
        ids, incarnations = [node.node_id for node in avoid], [node.incarnation for node in avoid]

        pieces = _split(packed, namespace.hash_bytes)

        def ask(piece: bytes) -> Placed:
            def build(handle: int) -> Message:
                return pb.Place(
                    ns=handle,
                    salt=salt,
                    hashes=piece,
                    boot_id=boot_id,
                    epoch=namespace.epoch,
                    avoid=ids,
                    avoid_incarnation=incarnations,
                    trace=TRACING.here() if packed else "",
                    unasked=unasked if piece is pieces[0] else b"",
                )

            def placed(master: Master) -> Placed:
                reply = _decoded(pb.PlaceOk, master.ask(namespace, deadline, Kind.PLACE, build))
                return decode_place(reply, len(piece) // namespace.hash_bytes)

            return self.masters.leading(placed)

        if not packed:  # nothing is asked: it is nobody's store
            return ask(packed)
        with TRACING.span("kvstrata.directory.place", kind=SpanKind.CLIENT):
            return join_placed([ask(piece) for piece in pieces])

    def remove(self, namespace: PoolNamespace, salt: str, packed: bytes, deadline: float, left_ms: int) -> RemoveResult:
        """Raises like :meth:`lookup`. ``left_ms``: how long the master may wait for nodes to confirm."""

        def ask(piece: bytes) -> pb.RemoveOk:
            def build(handle: int) -> Message:
                return pb.Remove(ns=handle, salt=salt, hashes=piece, deadline_ms=left_ms)

            return self.masters.leading(
                lambda master: _decoded(pb.RemoveOk, master.ask(namespace, deadline, Kind.REMOVE, build))
            )

        replies = [ask(piece) for piece in _split(packed, namespace.hash_bytes)]
        unreached = {node for reply in replies for node in reply.unreached}
        return RemoveResult(sum(reply.removed for reply in replies), tuple(sorted(unreached)))

    def report_miss(
        self,
        namespace: PoolNamespace,
        salt: str,
        packed: bytes,
        node: Endpoint,
        delta_seq: int,
        deadline: float,
        *,
        status: BlockStatus,
        at_store: bool = False,
    ) -> None:
        """Tell the master that ``node`` did not give these blocks, or did not take them (``at_store``), and how that
        ended. Best effort, ``REPORT_S`` at most within the call's ``deadline``: the node's deltas will say so too,
        and intents lapse."""
        deadline = min(deadline, time.monotonic() + REPORT_S)
        process = (self.masters.writer if at_store else self.masters.current).process
        try:
            for piece in _split(packed, namespace.hash_bytes):
                report = pb.MissReport(
                    ns=process.handle(namespace, deadline),
                    salt=salt,
                    hashes=piece,
                    node_id=node.node_id,
                    incarnation=node.incarnation,
                    delta_seq=delta_seq,
                    epoch=namespace.epoch,
                    status=status,
                    at_store=at_store,
                )
                process.channel.tell(Kind.MISS_REPORT, report.SerializeToString(), deadline)
        except KVError as error:
            log.debug("miss not reported", node=node.node_id, reason=str(error))

    def health(self) -> list[dict[str, object]]:
        """One dict a master; see :meth:`Masters.health`."""
        return self.masters.health()

    def close(self) -> None:
        self.masters.close()


def _decoded(message: type[M], data: bytes) -> M:
    try:
        return message.FromString(data)
    except Exception as error:
        raise ProtocolError(f"a {message.__name__} that does not decode") from error


def _knows(located: Located) -> bool:
    return not located.not_yet


def _split(packed: bytes, hash_bytes: int) -> list[bytes]:
    limit = HASHES_MAX * hash_bytes
    return [packed] if len(packed) <= limit else [packed[low:high] for low, high in pieces_of(len(packed), limit)]

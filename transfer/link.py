"""What every peer has, however the bytes move: a channel to the node, namespace handles, leases to return."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, Corrupt, KVError, LeaseExpired, Refused, TicketExpired, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus, HintKind
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Endpoint, Named, Push, StatusArray
from kvstrata.transfer.channel import Channel
from kvstrata.transfer.connection import expect
from kvstrata.transfer.frames import Disconnected, Late
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.replies import statuses
from kvstrata.transfer.touches import Touches
from kvstrata.transfer.tracing import TRACING, SpanKind

log = get_logger(__name__)

#: Leases handed back in one message.
RELEASES_MAX: Final = 4096
UPKEEP_S: Final = 0.25
#: How long a load may be held up to tell of many others.
SOON_S: Final = 0.005
#: An acquire's mode that leases nothing and begins to read what is on SSD only.
PREFETCH: Final = 2


class NodeLink:
    """Control side of a peer. Thread-safe: the deque's ends are atomic, handles are idempotent."""

    def __init__(self, endpoint: Endpoint, addresses: Sequence[str], identity: Identity) -> None:
        self.endpoint = endpoint
        self.channel = Channel(
            addresses, identity, accept=self._same_incarnation, self_probing=False, strangers_are_lost=True
        )
        self._handles: dict[Namespace, int] = {}
        self._releases: deque[int] = deque()
        self._touches = Touches()

    def handle(self, namespace: Namespace, deadline: float) -> int:
        """The node's handle of a namespace; one round trip the first time."""
        handle = self._handles.get(namespace)
        if handle is None:
            message = pb.OpenNamespace(spec=namespace.to_spec()).SerializeToString()
            reply = self.channel.call(Kind.OPEN_NAMESPACE, message, deadline)
            handle = self._handles[namespace] = expect(pb.NamespaceHandle, reply, Kind.NAMESPACE_HANDLE).handle
        return handle

    def reserve(self, request: Push) -> pb.Reserve:
        """The first half of a write, as a message.

        What this client has read by the index is told before it, so that the room is not made of what was read just
        now: as a rule, for another thread may be telling it at this moment.
        """
        self.tell_touched(SOON_S)
        return pb.Reserve(
            ns=self.handle(request.namespace, request.deadline),
            salt=request.salt,
            hashes=request.hashes,
            parent=request.parent,
            first_index=request.first_index,
            deadline_ms=_left_ms(request.deadline),
            epoch=request.epoch,
            releases=self.take_releases(),
            trace=TRACING.here(),
        )

    def acquire(
        self, namespace: Namespace, salt: str, hashes: bytes, deadline: float, epoch: int
    ) -> tuple[pb.AcquireOk, float]:
        """Leases on slots, to be read from elsewhere: the node's answer, and the moment before it was asked."""
        sent = time.monotonic()
        message = pb.Acquire(
            ns=self.handle(namespace, deadline),
            salt=salt,
            hashes=hashes,
            deadline_ms=max(1, int((deadline - sent) * 1e3)),
            releases=self.take_releases(),
            epoch=epoch,
        )
        if TRACING.on:
            with TRACING.span("kvstrata.acquire", kind=SpanKind.CLIENT):
                message.trace = TRACING.here()
                frame = self.channel.call(Kind.ACQUIRE, message.SerializeToString(), deadline)
        else:
            frame = self.channel.call(Kind.ACQUIRE, message.SerializeToString(), deadline)
        return expect(pb.AcquireOk, frame, Kind.ACQUIRE_OK), sent

    def abort(self, reservation: int) -> None:
        """Its writer gives it up. Where that cannot be said, the node ends it at its deadline."""
        message = pb.Abort(reservation=reservation).SerializeToString()
        with suppress(KVError):
            self.channel.call(Kind.ABORT, message, time.monotonic() + UPKEEP_S)

    # ------------------------------------------------------------------ blocks by name

    def prefetch(self, blocks: Named) -> StatusArray:
        """See :meth:`Peer.prefetch`."""
        message = pb.Acquire(
            ns=self.handle(blocks.namespace, blocks.deadline),
            salt=blocks.salt,
            hashes=blocks.hashes,
            mode=PREFETCH,
            deadline_ms=_left_ms(blocks.deadline),
            releases=self.take_releases(),
            epoch=blocks.epoch,
            trace=TRACING.here(),
        ).SerializeToString()
        reply = expect(pb.AcquireOk, self.channel.call(Kind.ACQUIRE, message, blocks.deadline), Kind.ACQUIRE_OK)
        return statuses(reply.status, len(blocks.hashes) // blocks.namespace.hash_bytes, BlockStatus.MISSING)

    def hint(self, blocks: Named, kind: HintKind, ttl_s: float) -> int:
        """See :meth:`Peer.hint`."""
        message = pb.Hint(
            ns=self.handle(blocks.namespace, blocks.deadline),
            salt=blocks.salt,
            hashes=blocks.hashes,
            epoch=blocks.epoch,
            kind=int(kind),
            ttl_ms=int(ttl_s * 1e3),
        ).SerializeToString()
        frame = self.channel.call(Kind.HINT, message, blocks.deadline)
        return expect(pb.HintOk, frame, Kind.HINT_OK).blocks

    # ------------------------------------------------------------------ reads without a lease

    def touched(self, namespace: Namespace, salt: str, hashes: bytes, epoch: int) -> None:
        """These blocks were read by the shared index: the node hears of it with the next upkeep, or when many wait."""
        if self._touches.add(self._handles[namespace], salt, epoch, hashes, namespace.hash_bytes):
            self.tell_touched(SOON_S)

    def tell_touched(self, within_s: float) -> None:
        """Tell now, if there is something. While no connection is free it waits for the next time; what a node that
        cannot be reached, or does not take, does not hear is not counted there: no call ends for it."""
        if not self._touches or not self.channel.breaker.closed:
            return
        messages = self._touches.take()
        until = time.monotonic() + within_s
        for told, message in enumerate(messages):
            try:
                self.channel.tell(Kind.TOUCHED, message.SerializeToString(), until)
            except Busy:
                self._touches.keep(messages[told:])
                return
            except KVError as error:
                log.debug("a node is not told of reads", node=self.endpoint.node_id, reason=str(error))
                return

    # ------------------------------------------------------------------ leases

    def give_back(self, lease: int) -> None:
        """The lease ends with the next message to the node, or with the next upkeep."""
        self._releases.append(lease)

    def take_releases(self) -> bytes:
        """Packed u64 leases for a message's ``releases`` field; the message must be sent."""
        releases = self._releases
        if not releases:
            return b""
        taken = array("Q")
        try:
            while releases and len(taken) < RELEASES_MAX:
                taken.append(releases.popleft())
        except IndexError:
            pass  # another thread's message carries the last ones
        return taken.tobytes()

    def upkeep(self) -> None:
        """Return leases nobody's message has carried, and probe an open breaker."""
        self.channel.probe()
        self.tell_touched(UPKEEP_S)
        if self._releases and self.channel.breaker.closed:
            message = pb.Release(leases=self.take_releases()).SerializeToString()
            with suppress(Unavailable, Busy):  # a node that is gone has no leases to end
                self.channel.tell(Kind.RELEASE, message, time.monotonic() + UPKEEP_S)

    def _same_incarnation(self, hello: pb.HelloOk) -> None:
        expected = self.endpoint.incarnation
        if expected and hello.incarnation != expected:
            raise Disconnected(f"node {hello.node_id} was restarted: its old blocks are gone")

    def close(self) -> None:
        self.upkeep_once_more()
        self.channel.close()

    def upkeep_once_more(self) -> None:
        if self.channel.breaker.closed:  # a probe of a dead node would hold up the close
            with suppress(KVError):
                self.upkeep()


def _left_ms(deadline: float) -> int:
    return max(1, int((deadline - time.monotonic()) * 1e3))


def undecided(count: int) -> StatusArray:
    return np.zeros(count, np.uint8)


def settle(status: StatusArray, error: KVError) -> None:
    """Give every undecided position the status an error stands for; refusals of the call are raised."""
    if isinstance(error, Late):
        code = BlockStatus.LATE
    elif isinstance(error, LeaseExpired):
        code = BlockStatus.LEASE_LOST
    elif isinstance(error, Corrupt):
        code = BlockStatus.CORRUPT
    elif isinstance(error, Busy):
        code = BlockStatus.LATE
    elif isinstance(error, Unavailable | TicketExpired):
        code = BlockStatus.NODE_LOST
    elif isinstance(error, Refused):
        raise error
    else:
        code = BlockStatus.REFUSED
    status[status == BlockStatus.UNKNOWN] = code
    status[status == BlockStatus.RESERVED] = code

"""Channel handlers that read: acquire, release, renew."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.status import SLOT_ROW
from kvstrata.proto.wire import RAW_BYTES_MAX, Kind
from kvstrata.storage.leases import granted_seconds
from kvstrata.storage.messages import parsed, reply, u64s
from kvstrata.storage.receiver import runs
from kvstrata.storage.state import Acquired, NodeState
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.server import Handler, Reply
from kvstrata.transfer.sessions import ServerConnection


class ReadHandlers:
    """Over one :class:`NodeState` and its lock."""

    def __init__(self, state: NodeState, lock: threading.Lock, clock: Callable[[], float]) -> None:
        self._state = state
        self._lock = lock
        self._clock = clock

    def handlers(self) -> dict[int, Handler]:
        return {Kind.ACQUIRE: self._acquire, Kind.RELEASE: self._release, Kind.RENEW: self._renew}

    def _acquire(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Acquire, frame)
        if message.mode > 1:
            raise InvalidArgument(f"acquire mode {message.mode} is unknown: 0 leases, 1 sends the bytes")
        inline = message.mode == 1
        seconds = 0.0 if inline else granted_seconds(message.deadline_ms)
        key = connection.owner.key
        releases = u64s(message.releases)
        with self._lock:
            if releases:
                self._state.release(key, releases)
            got = self._state.acquire(
                key, message.ns, message.salt, message.hashes, seconds, self._clock(), message.epoch
            )
        return self._with_bytes(got) if inline else _with_slots(got, seconds)

    def _with_bytes(self, got: Acquired) -> Reply:
        """The blocks' bytes follow the answer; the lease ends when they are sent, or cannot be."""
        blocks, lease = got.blocks, got.lease
        if lease is None:
            return reply(Kind.ACQUIRE_OK, pb.AcquireOk(status=bytes(got.status), delta_seq=got.delta_seq))

        nbytes = len(blocks) * blocks[0].shelf.entry.block_bytes

        def after() -> None:
            with self._lock:
                self._state.end(lease)
                self._state.counts.bytes_out += nbytes

        if nbytes > RAW_BYTES_MAX:
            after()
            raise InvalidArgument(f"{nbytes} bytes in one answer: at most {RAW_BYTES_MAX}; ask for fewer blocks")
        answer = pb.AcquireOk(
            status=bytes(got.status),
            tier=bytes(len(blocks)),
            checksum=array("Q", [block.checksum for block in blocks]).tobytes(),
            delta_seq=got.delta_seq,
        )
        raw = [view for view, _ in runs(blocks)]
        return Reply(Kind.ACQUIRE_OK, answer.SerializeToString(), raw, after=after)

    def _release(self, connection: ServerConnection, frame: Frame) -> None:
        leases = u64s(parsed(pb.Release, frame).leases)
        with self._lock:
            self._state.release(connection.owner.key, leases)

    def _renew(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Renew, frame)
        with self._lock:
            lease_ms = self._state.renew(connection.owner.key, message.lease, message.lease_ms, self._clock())
        return reply(Kind.RENEW_OK, pb.RenewOk(lease_ms=lease_ms))


def _with_slots(got: Acquired, seconds: float) -> Reply:
    """Where the leased blocks lie, for a caller that copies them itself. The tier is DRAM: zero bytes."""
    blocks = got.blocks
    pack = SLOT_ROW.pack
    rows = [pack(block.slab.index, block.slot, block.offset, block.generation, block.checksum) for block in blocks]
    answer = pb.AcquireOk(
        status=bytes(got.status),
        tier=bytes(len(blocks)),
        lease=got.lease.id if got.lease is not None else 0,
        lease_ms=int(seconds * 1e3),
        rows=b"".join(rows),
        delta_seq=got.delta_seq,
    )
    return Reply(Kind.ACQUIRE_OK, answer.SerializeToString())

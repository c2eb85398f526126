"""Channel handlers that read: acquire, release, renew; and what clients have read by the shared index.

Blocks that are on SSD only are read into memory first. The handler's thread waits for that, within its caller's
deadline; what has not come by then is LATE, and comes for whoever asks next.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import HASHES_MAX
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.proto.wire import RAW_BYTES_MAX, Kind
from kvstrata.storage.copying.source import CopySource
from kvstrata.storage.leases import granted_seconds
from kvstrata.storage.records import VISIBLE, packed_rows
from kvstrata.storage.serving.messages import parsed, reply, u32s, u64s
from kvstrata.storage.serving.permission import check_touch
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.storage.serving.receiver import runs
from kvstrata.storage.state import Acquired, NodeState, Touched
from kvstrata.storage.tiers.movers import Movers
from kvstrata.storage.tiers.moves import Read
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.security.rights import Role
from kvstrata.transfer.server import Handler, Reply
from kvstrata.transfer.sessions import ServerConnection
from kvstrata.transfer.tracing import TRACING

_LEASE, _INLINE, _PREFETCH, _COPY = range(4)
#: A read waits for the SSD for this part of its caller's deadline: the answer has to travel, too.
WAIT_SHARE: Final = 0.9
#: However patient the caller is, its thread is not held for longer.
WAIT_MAX_S: Final = 30.0
_MISSING = int(BlockStatus.MISSING)
_LOADED = int(BlockStatus.LOADED)


class ReadHandlers:
    """Over one :class:`NodeState` and its lock; ``movers`` when the node has an SSD, ``copies`` for other nodes,
    ``rails`` when sessions may read by themselves from other hosts."""

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        clock: Callable[[], float],
        movers: Movers | None = None,
        copies: CopySource | None = None,
        rails: NodeRails | None = None,
    ) -> None:
        self._state = state
        self._lock = lock
        self._clock = clock
        self._movers = movers
        self._copies = copies
        self._rails = rails

    def handlers(self) -> dict[int, Handler]:
        return {
            Kind.ACQUIRE: self._acquire,
            Kind.RELEASE: self._release,
            Kind.RENEW: self._renew,
            Kind.TOUCHED: self._touched,
        }

    def _acquire(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Acquire, frame)
        if message.mode > _COPY:
            raise InvalidArgument(
                f"acquire mode {message.mode} is unknown: 0 leases, 1 sends the bytes, 2 reads ahead into memory, "
                "3 sends them to another node"
            )
        copies = self._for_nodes(connection) if message.mode == _COPY else None
        check_touch(connection, self._state, message)
        if copies is not None:
            return copies.answer(message)
        releases = u64s(message.releases)
        if message.mode == _PREFETCH:
            return self._prefetch(connection, message, releases)
        inline = message.mode == _INLINE
        seconds = 0.0 if inline else granted_seconds(message.deadline_ms)
        key = connection.owner.key
        if self._rails is not None and not inline:
            self._rails.stir(key)
        with self._lock:
            if releases:
                self._state.release(key, releases)
            read = self._read_from_ssd(message)
            got = self._state.acquire(
                key, message.ns, message.salt, message.hashes, seconds, self._clock(), message.epoch
            )
            tiers = self._tiers(read, message.hashes, got) if read is not None else bytes(len(got.blocks))
            if got.blocks and not inline:  # the reader copies them itself
                self._state.counts.bytes_out += len(got.blocks) * got.blocks[0].shelf.entry.block_bytes
        return self._with_bytes(got, tiers) if inline else _with_slots(got, tiers, seconds)

    def _for_nodes(self, connection: ServerConnection) -> CopySource:
        if self._copies is None or not connection.rights.has(Role.NODE):
            role = connection.owner.hello.role
            raise InvalidArgument(f"acquire mode 3 is for nodes, and this is a {role or 'peer without a role'}")
        return self._copies

    # ------------------------------------------------------------------ from SSD

    def _read_from_ssd(self, message: pb.Acquire) -> Read | None:
        """Have what is on SSD only read into memory; with the lock held, which is let go of meanwhile."""
        if self._movers is None:
            return None
        hashes = self._hashes(message)
        read = self._movers.tiers.begin_read(message.ns, message.salt, hashes, self._clock())
        if read is not None:
            with TRACING.span("kvstrata.node.promote"):
                self._movers.fetch(read, min(message.deadline_ms / 1e3 * WAIT_SHARE, WAIT_MAX_S))
        return read

    def _hashes(self, message: pb.Acquire) -> list[bytes]:
        """Empty when the state will refuse the call, or find nothing."""
        entry = self._state.entry(message.ns)
        packed, width = message.hashes, entry.width
        if self._state.left or message.epoch != entry.epoch or len(packed) % width or len(packed) // width > HASHES_MAX:
            return []
        return [packed[start : start + width] for start in range(0, len(packed), width)]

    def _tiers(self, read: Read, packed: bytes, got: Acquired) -> bytes:
        """Where each leased block was when it was asked for; ``got`` learns why others did not come."""
        assert self._movers is not None
        self._movers.tiers.end_read(read)
        counts = self._state.counts
        width = len(packed) // len(got.status)
        tiers = bytearray()
        for position, status in enumerate(got.status):
            key = packed[position * width : (position + 1) * width]
            if status == _LOADED:
                tiers.append(Tier.SSD if key in read.cold else Tier.DRAM)
            elif status == _MISSING and key in read.cold:
                got.status[position] = why = read.why(key)
                counts.misses_no_room += why == BlockStatus.NO_ROOM
                counts.misses_late += why == BlockStatus.LATE
                counts.misses_corrupt += why == BlockStatus.CORRUPT
                counts.misses_read_error += why == BlockStatus.READ_ERROR
        counts.hits_ssd += tiers.count(Tier.SSD)
        return bytes(tiers)

    def _prefetch(self, connection: ServerConnection, message: pb.Acquire, releases: array[int]) -> Reply:
        """Begin to read ahead, and say what is in memory and what is on its way."""
        with self._lock:
            self._state.release(connection.owner.key, releases)
            hashes = self._hashes(message)
            if self._movers is not None and hashes:
                status, moves = self._movers.tiers.prefetch(message.ns, message.salt, hashes, self._clock())
                self._movers.ahead(moves)
            else:
                status = self._in_memory(message, hashes)
            sequence = self._state.deltas.answer_seq
        return reply(Kind.ACQUIRE_OK, pb.AcquireOk(status=bytes(status), delta_seq=sequence))

    def _in_memory(self, message: pb.Acquire, hashes: list[bytes]) -> bytearray:
        shelf = self._state.inventory.shelves.get((message.ns, message.salt)) if hashes else None
        count = len(message.hashes) // self._state.entry(message.ns).width
        if shelf is None:
            return bytearray([_MISSING]) * count
        found = [shelf.blocks.get(key) for key in hashes]
        inventory = self._state.inventory
        inventory.now = self._clock()
        inventory.policy.next_stamp()
        inventory.policy.touch([block for block in found if block is not None and block.state == VISIBLE])
        return bytearray(_LOADED if b is not None and b.state == VISIBLE else _MISSING for b in found)

    # ------------------------------------------------------------------ answers

    def _with_bytes(self, got: Acquired, tiers: bytes) -> Reply:
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
            tier=tiers,
            checksum=array("Q", [block.checksum for block in blocks]).tobytes(),
            delta_seq=got.delta_seq,
        )
        raw = [view for view, _ in runs(blocks)]
        return Reply(Kind.ACQUIRE_OK, answer.SerializeToString(), raw, after=after)

    def _release(self, connection: ServerConnection, frame: Frame) -> None:
        leases = u64s(parsed(pb.Release, frame).leases)
        with self._lock:
            self._state.release(connection.owner.key, leases)

    def _touched(self, connection: ServerConnection, frame: Frame) -> None:
        message = parsed(pb.Touched, frame)
        check_touch(connection, self._state, message)
        calls, times = u32s(message.calls), u32s(message.times)
        touched = Touched(message.ns, message.salt, message.hashes, calls, times, message.epoch)
        with self._lock:
            self._state.touched(touched, self._clock())

    def _renew(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.Renew, frame)
        with self._lock:
            lease_ms = self._state.renew(connection.owner.key, message.lease, message.lease_ms, self._clock())
        return reply(Kind.RENEW_OK, pb.RenewOk(lease_ms=lease_ms))


def _with_slots(got: Acquired, tiers: bytes, seconds: float) -> Reply:
    """Where the leased blocks lie, for a caller that copies them itself."""
    answer = pb.AcquireOk(
        status=bytes(got.status),
        tier=tiers,
        lease=got.lease.id if got.lease is not None else 0,
        lease_ms=int(seconds * 1e3),
        rows=packed_rows(got.blocks),
        delta_seq=got.delta_seq,
        scope=got.blocks[0].shelf.scope if got.blocks else 0,
    )
    return Reply(Kind.ACQUIRE_OK, answer.SerializeToString())

"""Blocks for another node: sent as they lie in memory, or read from SSD into a buffer of their own.

Nothing becomes more recent, no reader's counts move, and nothing leaves memory for what is read from SSD.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import HASHES_MAX
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.proto.wire import Kind
from kvstrata.storage.copying.bandwidth import Pace
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.records import VISIBLE, Block, Lease
from kvstrata.storage.serving.messages import reply
from kvstrata.storage.serving.receiver import runs
from kvstrata.storage.ssd.base import READ_TIMEOUT_S
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.moves import TierMoves
from kvstrata.transfer.server import Reply

#: Bytes of one answer; more than one block must fit in.
COPY_BYTES_MAX: Final = 16 << 20
#: Answers that read from SSD at once: each has a buffer of up to ``COPY_BYTES_MAX``.
READS_MAX: Final = 2
_U32_MAX: Final = (1 << 32) - 1

_LOADED = int(BlockStatus.LOADED)
_MISSING = int(BlockStatus.MISSING)
_LATE = int(BlockStatus.LATE)


@dataclass(slots=True)
class _Found:
    """``blocks`` by position; a lease for each tier that has some of them."""

    status: bytearray
    blocks: list[tuple[int, Block, float]]
    lease: Lease | None
    lease_below: Lease | None


class CopySource:
    """Over one node's state and its lock; ``moves`` when it has an SSD."""

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        pace: Pace,
        moves: TierMoves | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._lock = lock
        self._pace = pace
        self._moves = moves
        self._clock = clock
        self._reads = threading.BoundedSemaphore(READS_MAX)

    def answer(self, message: pb.Acquire) -> Reply:
        """What an acquire for a copy is answered; the calling thread waits for bandwidth and for the SSD.

        Raises :class:`InvalidArgument` for more bytes than one answer takes, :class:`FingerprintMismatch` for an
        unknown handle.
        """
        deadline = time.monotonic() + message.deadline_ms / 1e3
        with self._lock:
            entry = self._state.entry(message.ns)
        count, rest = divmod(len(message.hashes), entry.width)
        nbytes = count * entry.block_bytes
        if rest or count > HASHES_MAX or (count > 1 and nbytes > COPY_BYTES_MAX):
            raise InvalidArgument(f"{count} blocks, {nbytes} bytes: at most {COPY_BYTES_MAX} of whole hashes a copy")
        if not self._pace.take(nbytes, deadline):
            return self._nothing(count, _LATE)
        with self._lock:
            found = self._find(message, count)
        try:
            buffers = self._read_below(found, deadline)
        except BaseException:
            self._end(found, 0)
            raise
        self._pace.give_back((count - len(found.blocks)) * entry.block_bytes)
        return self._reply(found, buffers, entry.block_bytes, entry.width)

    def _find(self, message: pb.Acquire, count: int) -> _Found:
        """With the lock held: what is here, leased."""
        state, now = self._state, self._clock()
        entry = state.entry(message.ns)
        found = _Found(bytearray([_MISSING]) * count, [], None, None)
        if message.epoch != entry.epoch:
            return found
        tiers = [(inventory, inventory.shelves.get((message.ns, message.salt))) for inventory in state.tiers()]
        by_tier: dict[Tier, list[Block]] = {Tier.DRAM: [], Tier.SSD: []}
        for position in range(count):
            key = message.hashes[position * entry.width : (position + 1) * entry.width]
            for inventory, shelf in tiers:
                block = shelf.blocks.get(key) if shelf is not None else None
                if block is not None and block.state == VISIBLE and (inventory.tier == Tier.DRAM or self._moves):
                    found.status[position] = _LOADED
                    found.blocks.append((position, block, _idle_s(inventory, block, now)))
                    by_tier[inventory.tier].append(block)
                    break
        if by_tier[Tier.DRAM]:
            found.lease = state.leases.hold(by_tier[Tier.DRAM], now, sent=True)
        if by_tier[Tier.SSD]:
            assert self._moves is not None
            found.lease_below = self._moves.ssd.leases.hold(by_tier[Tier.SSD], now)
        return found

    # ------------------------------------------------------------------ from SSD

    def _read_below(self, found: _Found, deadline: float) -> dict[int, memoryview]:
        """Payloads by position of what is on SSD only; what could not be read is no longer among the blocks."""
        lease = found.lease_below
        if lease is None:
            return {}
        store = self._state.store
        assert store is not None
        cold = [(position, block) for position, block, _ in found.blocks if block.shelf in lease.shelves]
        nbytes = cold[0][1].shelf.entry.block_bytes
        statuses: Sequence[int] = [_LATE] * len(cold)
        memory = memoryview(b"")
        left_s = min(READ_TIMEOUT_S, deadline - time.monotonic())
        if left_s > 0 and self._reads.acquire(timeout=left_s):
            try:
                memory = memoryview(bytearray(len(cold) * nbytes))
                views = [memory[row * nbytes : (row + 1) * nbytes] for row in range(len(cold))]
                statuses = store.read([block for _, block in cold], views, timeout_s=left_s)
            finally:
                self._reads.release()
        self._judge(found, cold, statuses)
        return {
            position: memory[row * nbytes : (row + 1) * nbytes]
            for row, (position, _) in enumerate(cold)
            if statuses[row] == _LOADED
        }

    def _judge(self, found: _Found, cold: Sequence[tuple[int, Block]], statuses: Sequence[int]) -> None:
        assert self._moves is not None and found.lease_below is not None
        now = self._clock()
        bad: set[int] = set()
        with self._lock:
            for (position, block), status in zip(cold, statuses, strict=True):
                if status == _LOADED:
                    continue
                bad.add(position)
                found.status[position] = status
                if status != _LATE and block.state == VISIBLE and not block.shelf.retired:
                    self._moves.gone_bad(block, status, now)
            self._moves.ssd.leases.end(found.lease_below)
            found.lease_below = None
        found.blocks = [each for each in found.blocks if each[0] not in bad]

    # ------------------------------------------------------------------ the answer

    def _nothing(self, count: int, status: int) -> Reply:
        with self._lock:
            sequence = self._state.deltas.answer_seq
        return reply(Kind.ACQUIRE_OK, pb.AcquireOk(status=bytes([status]) * count, delta_seq=sequence))

    def _reply(self, found: _Found, buffers: dict[int, memoryview], block_bytes: int, width: int) -> Reply:
        blocks = [block for _, block, _ in found.blocks]
        with self._lock:
            sequence = self._state.deltas.answer_seq
        answer = pb.AcquireOk(
            status=bytes(found.status),
            tier=bytes(Tier.SSD if position in buffers else Tier.DRAM for position, _, _ in found.blocks),
            checksum=array("Q", [block.checksum for block in blocks]).tobytes(),
            before=b"".join(block.before or bytes(width) for block in blocks),
            index=array("I", [block.index for block in blocks]).tobytes(),
            idle_ms=array("I", [min(_U32_MAX, int(idle_s * 1e3)) for _, _, idle_s in found.blocks]).tobytes(),
            delta_seq=sequence,
        )
        given = len(blocks) * block_bytes

        def after() -> None:
            self._end(found, given, from_ssd=len(buffers))

        return Reply(Kind.ACQUIRE_OK, answer.SerializeToString(), _raw(found, buffers), after=after)

    def _end(self, found: _Found, nbytes: int, from_ssd: int = 0) -> None:
        """Nothing of the answer is read any more."""
        with self._lock:
            if found.lease is not None:
                self._state.leases.end(found.lease)
            if found.lease_below is not None:
                assert self._moves is not None
                self._moves.ssd.leases.end(found.lease_below)
            counts = self._state.copies.counts
            counts.given += len(found.blocks) if nbytes else 0
            counts.given_bytes += nbytes
            counts.given_from_ssd += from_ssd


def _idle_s(inventory: Inventory, block: Block, now: float) -> float:
    return inventory.ages.idle_s(block.stamp, now)


def _raw(found: _Found, buffers: dict[int, memoryview]) -> list[memoryview]:
    """The payloads in order: neighbours in memory as one buffer."""
    raw: list[memoryview] = []
    beside: list[Block] = []
    for position, block, _ in found.blocks:
        if position not in buffers:
            beside.append(block)
            continue
        raw.extend(view for view, _ in (runs(beside) if beside else ()))
        beside = []
        raw.append(buffers[position])
    raw.extend(view for view, _ in (runs(beside) if beside else ()))
    return raw

"""Transport over the channel's own TCP connections: block bytes follow the messages, in place.

A load is one round trip: the answer's bytes land in the destination descriptors. Large batches are cut
in parts that several connections carry at once, so that one part is hashed while another arrives.
Every block is verified: nothing else vouches for bytes that crossed a network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import KVError, ProtocolError, Refused
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, HintKind
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Endpoint, Fetch, Fetched, Lease, Mask, Named, Push, Pushed, StatusArray
from kvstrata.transfer.checksums import RangeChecksums, block_checksum, checksums, digests
from kvstrata.transfer.compact import blank, compact, in_small_pieces, scatter
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.cores import usable_cores
from kvstrata.transfer.grants import Granted
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.link import NodeLink, settle, undecided
from kvstrata.transfer.ranges import cut, tell_whole
from kvstrata.transfer.regions import BlockView, Region
from kvstrata.transfer.replies import flags, statuses
from kvstrata.transfer.tracing import TRACING, SpanKind

#: One part of a batch: large enough to stream, small enough to overlap with its neighbours.
PART_BYTES: Final = 16 << 20
#: Neighbouring blocks are received as one buffer of at most this, and hashed while it is in cache.
RECEIVE_BYTES: Final = 256 << 10
#: Neighbouring blocks are sent as one buffer of at most this.
SEND_BYTES: Final = 1 << 30
SOCKETS: Final = min(4, usable_cores())

_LOADED = int(BlockStatus.LOADED)
_RESERVED = int(BlockStatus.RESERVED)


class TcpTransport:
    """Reaches every node."""

    name = "tcp"

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._threads = ThreadPoolExecutor(4 * SOCKETS, thread_name_prefix="kvstrata-tcp")

    def reaches(self, endpoint: Endpoint) -> bool:
        return bool(endpoint.channel)

    def connect(self, endpoint: Endpoint) -> TcpPeer:
        return TcpPeer(endpoint, self._identity, self._threads)

    def register(self, region: Region) -> None:
        """Nothing to do: the kernel copies from and to any memory."""

    def unregister(self, region: Region) -> None:
        """Nothing was registered."""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class TcpPeer:
    """One node over TCP."""

    transport = "tcp"

    def __init__(self, endpoint: Endpoint, identity: Identity, threads: ThreadPoolExecutor) -> None:
        self.endpoint = endpoint
        self.link = NodeLink(endpoint, [endpoint.channel], identity)
        self.tamper: Callable[[BlockView, int], None] | None = None
        self._threads = threads

    # ------------------------------------------------------------------ reading

    def fetch(self, request: Fetch) -> Fetched:
        count = len(request.blocks)
        status, tier = undecided(count), np.zeros(count, np.uint8)
        sequences = self._in_parts(
            status, request.namespace.block_bytes, lambda low, high: self._fetch_part(request, low, high, status, tier)
        )
        tell_whole(request, status)
        moved = int(np.count_nonzero(status == _LOADED)) * request.namespace.block_bytes
        return Fetched(status, tier, max(sequences, default=0), moved)

    def _fetch_part(self, request: Fetch, low: int, high: int, status: StatusArray, tier: StatusArray) -> int:
        with TRACING.span("kvstrata.acquire", kind=SpanKind.CLIENT):
            return self._acquire_part(request, low, high, status, tier)

    def _acquire_part(self, request: Fetch, low: int, high: int, status: StatusArray, tier: StatusArray) -> int:
        link, namespace = self.link, request.namespace
        message = pb.Acquire(
            ns=link.handle(namespace, request.deadline),
            salt=request.salt,
            hashes=request.hashes[low * namespace.hash_bytes : high * namespace.hash_bytes],
            mode=1,
            deadline_ms=max(1, int((request.deadline - time.monotonic()) * 1e3)),
            releases=link.take_releases(),
            epoch=request.epoch,
            trace=TRACING.here(),
        ).SerializeToString()
        sent = time.monotonic()
        with link.channel.exchange(Kind.ACQUIRE, message, request.deadline) as (connection, frame):
            granted = Granted(expect(pb.AcquireOk, frame, Kind.ACQUIRE_OK), sent, high - low, inline=True)
            if frame.raw_bytes != granted.count * namespace.block_bytes:
                raise ProtocolError(f"{frame.raw_bytes} bytes for {granted.count} blocks of {namespace.block_bytes}")
            blocks = request.blocks[low:high][granted.positions]
            good = np.zeros(granted.count, bool)
            try:
                with TRACING.span("kvstrata.receive"):
                    self._receive(connection, request, blocks, granted, good)
            finally:
                part = granted.status
                part[granted.positions[~good]] = BlockStatus.UNKNOWN
                status[low:high] = part
                tier[low:high][granted.positions] = granted.tier
        return granted.delta_seq

    def _receive(
        self, connection: Connection, request: Fetch, blocks: BlockView, granted: Granted, good: npt.NDArray[np.bool_]
    ) -> None:
        tamper, wanted = self.tamper, granted.checksum.tolist()
        # Small pieces are filled from a copy, block by block, and not one by one from the socket.
        into = blank(blocks) if in_small_pieces(blocks) else blocks
        views, ends = _views(into, RECEIVE_BYTES)

        def filled(view: int) -> None:
            low, high = ends[view], ends[view + 1]
            if low == high:
                return  # the block goes on in the next piece
            if tamper is not None:
                for index in range(low, high):
                    tamper(into, index)
            # At once: should the rest not come, this stands.
            if into.pieces == 1:
                found = digests(views[view], blocks.block_bytes)
            else:
                found = [block_checksum(blocks, low)]
            if into is not blocks:
                scatter(blocks[low:high], into[low:high])
            if found != wanted[low:high]:
                wrong = [low + index for index, digest in enumerate(found) if digest != wanted[low + index]]
                granted.status[granted.positions[wrong]] = BlockStatus.CORRUPT
            good[low:high] = True

        connection.receive_raw(views, request.deadline, filled)

    def view(self, namespace: Namespace, salt: str, hashes: bytes, deadline: float, epoch: int = 0) -> Lease:
        raise Refused("views need the shm transport: a node on this host with a reachable unix socket")

    def prefetch(self, blocks: Named) -> StatusArray:
        return self.link.prefetch(blocks)

    def hint(self, blocks: Named, kind: HintKind, ttl_s: float) -> int:
        return self.link.hint(blocks, kind, ttl_s)

    # ------------------------------------------------------------------ writing

    def push(self, request: Push) -> Pushed:
        status, durable = undecided(len(request.blocks)), np.zeros(len(request.blocks), bool)
        self._in_parts(
            status,
            request.namespace.block_bytes,
            lambda low, high: self._push_part(request, low, high, status, durable),
            in_turns=request.written is None,
        )
        moved = int(np.count_nonzero(status == BlockStatus.STORED)) * request.namespace.block_bytes
        return Pushed(status, moved, durable)

    def _push_part(self, request: Push, low: int, high: int, status: StatusArray, durable: Mask) -> int:
        link, width = self.link, request.namespace.hash_bytes
        part = Push(
            namespace=request.namespace,
            salt=request.salt,
            hashes=request.hashes[low * width : high * width],
            blocks=request.blocks[low:high],
            deadline=request.deadline,
            parent=request.hashes[(low - 1) * width : low * width] if low else request.parent,
            first_index=request.first_index + low,
            epoch=request.epoch,
            parts=request.parts,
            written=request.written,
        )
        ranges = cut(part.blocks, part.parts)
        if part.written is not None and not part.written(0 if len(ranges) > 1 else len(part.parts) - 1, part.deadline):
            status[low:high] = BlockStatus.ABORTED
            return 0
        with TRACING.span("kvstrata.reserve", kind=SpanKind.CLIENT):
            frame = link.channel.call(Kind.RESERVE, link.reserve(part).SerializeToString(), request.deadline)
            reply = expect(pb.ReserveOk, frame, Kind.RESERVE_OK)
        got = statuses(reply.status, high - low, BlockStatus.REFUSED)
        status[low:high] = got
        durable[low:high] = flags(reply.durable, high - low)
        granted = np.flatnonzero(got == _RESERVED)
        if not len(granted):
            return 0
        if len(ranges) > 1:
            done = self._write_ranges(part, ranges, granted, reply.reservation)
        else:
            blocks = compact(part.blocks[granted])
            message = pb.Write(reservation=reply.reservation, checksums=checksums(blocks).tobytes())
            done = self._write(blocks, message, request.deadline)
        ended = done.status or bytes((BlockStatus.ABORTED,)) * len(granted)
        status[low:high][granted] = statuses(ended, len(granted), BlockStatus.REFUSED)
        durable[low:high][granted] = flags(done.durable, len(granted))
        return 0

    def _write_ranges(
        self, part: Push, ranges: list[BlockView], granted: npt.NDArray[np.intp], reservation: int
    ) -> pb.CommitOk:
        """Range after range, as the blocks are written; the last one commits. An answer of no blocks where the writer
        gives up."""
        assert part.written is not None
        hashed, at = RangeChecksums(len(granted)), 0
        try:
            for index, whole in enumerate(ranges):
                if not part.written(index, part.deadline):
                    self.link.abort(reservation)
                    return pb.CommitOk()
                blocks = compact(whole[granted])
                hashed.add(blocks)
                message = pb.Write(reservation=reservation, at=at, nbytes=whole.block_bytes)
                at += whole.block_bytes
                if index == len(ranges) - 1:
                    message.checksums = hashed.values().tobytes()
                done = self._write(blocks, message, part.deadline)
                if _RESERVED not in done.status:
                    return done
        except BaseException:
            self.link.abort(reservation)  # nothing to a node that has committed it
            raise
        raise ProtocolError("the last range of blocks was taken, and nothing committed")

    def _write(self, blocks: BlockView, message: pb.Write, deadline: float) -> pb.CommitOk:
        raw, _ = _views(blocks, SEND_BYTES)
        with (
            TRACING.span("kvstrata.write", kind=SpanKind.CLIENT),
            self.link.channel.exchange(Kind.WRITE, _traced(message), deadline, raw) as (_, answer),
        ):
            return expect(pb.CommitOk, answer, Kind.COMMIT_OK)

    # ------------------------------------------------------------------ parts

    def _in_parts(
        self, status: StatusArray, block_bytes: int, run: Callable[[int, int], int], *, in_turns: bool = True
    ) -> list[int]:
        """Call ``run(low, high)`` for each part, on this thread and up to ``SOCKETS - 1`` others: all at once, unless
        ``in_turns``."""
        step = max(1, PART_BYTES // block_bytes)
        if not in_turns:
            step = max(step, -(-len(status) // SOCKETS))
        bounds = [(low, min(low + step, len(status))) for low in range(0, len(status), step)]
        if len(bounds) == 1 and len(status) > 1 and len(status) * block_bytes >= PART_BYTES // 2:
            middle = len(status) // 2
            bounds = [(0, middle), (middle, len(status))]

        def work(which: slice) -> list[int]:
            return [self._settled(run, low, high, status) for low, high in bounds[which]]

        lanes = min(SOCKETS, len(bounds))
        others = [
            self._threads.submit(TRACING.carried(partial(work, slice(lane, None, lanes)))) for lane in range(1, lanes)
        ]
        try:
            results = work(slice(0, None, lanes))
        finally:
            if others:
                wait(others)  # on an error too: until they end, they write to the caller's memory
        for other in others:
            results.extend(other.result())
        return results

    def _settled(self, run: Callable[[int, int], int], low: int, high: int, status: StatusArray) -> int:
        try:
            return run(low, high)
        except KVError as error:
            settle(status[low:high], error)
            return 0

    # ------------------------------------------------------------------ upkeep

    def reachable(self) -> bool:
        return self.link.channel.breaker.closed

    def upkeep(self) -> None:
        self.link.upkeep()

    def close(self) -> None:
        self.link.close()


def _traced(message: pb.Write) -> bytes:
    message.trace = TRACING.here()
    return message.SerializeToString()


def _views(blocks: BlockView, joined_bytes_max: int) -> tuple[list[memoryview], list[int]]:
    """Buffers over the blocks' bytes, in order, and how many blocks are whole before the first and after each of them.

    Blocks in one piece each that are neighbours share a buffer of at most ``joined_bytes_max``, or one block's bytes.
    """
    data, count = memoryview(blocks.region.bytes), len(blocks)  # type: ignore[arg-type]
    if blocks.pieces > 1:
        views = [data[start : start + length] for start, length in blocks.table.reshape(-1, 2).tolist()]
        return views, [view // blocks.pieces for view in range(len(views) + 1)]
    starts, nbytes = blocks.table[:, 0, 0], blocks.block_bytes
    together = max(1, joined_bytes_max // nbytes)
    edges = [0, *(np.flatnonzero(starts[1:] - starts[:-1] != nbytes) + 1).tolist(), count] if count else [0]
    ends = [low for start, stop in pairwise(edges) for low in range(start, stop, together)]
    at = starts[ends].tolist()
    ends.append(count)
    return [data[start : start + (b - a) * nbytes] for start, (a, b) in zip(at, pairwise(ends), strict=True)], ends

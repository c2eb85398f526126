"""Stores that a node takes by itself out of registered memory: one round trip to pull, one to commit.

Blocks that are still being written are taken range by range, as each range is there.

The writer hashes while the node copies. It commits only after the node has said that all bytes were read, so what a
node reads after its writer has given up is never stored.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Mask, Push, StatusArray
from kvstrata.transfer.checksums import RangeChecksums, checksums
from kvstrata.transfer.connection import expect
from kvstrata.transfer.link import NodeLink
from kvstrata.transfer.ranges import all_written, cut
from kvstrata.transfer.regions import BlockView
from kvstrata.transfer.replies import flags, statuses
from kvstrata.transfer.tracing import TRACING, SpanKind

#: Stores up to this size are hashed first and commit in the same round trip: the node compares what it has read, which
#: takes less than another round trip.
COMMIT_AT_ONCE_BYTES: Final = 1 << 20

_RESERVED = int(BlockStatus.RESERVED)


def pull(link: NodeLink, request: Push, status: StatusArray, durable: Mask) -> None:
    """Let the node take the blocks; their region is registered with it. Fills ``status`` and ``durable``.

    Memory on a device is hashed by the node, which takes its own checksums for those of the commit.
    Raises :class:`KVError`; what is undecided then was not stored.
    """
    ranges = cut(request.blocks, request.parts)
    if len(ranges) > 1:
        _pull_ranges(link, request, ranges, status, durable)
        return
    if not all_written(request):
        status[:] = BlockStatus.ABORTED
        return
    blocks = request.blocks
    hash_here = not blocks.region.memory.on_host
    at_once = not hash_here and len(blocks) * blocks.block_bytes <= COMMIT_AT_ONCE_BYTES
    hashed: list[npt.NDArray[np.uint64]] = []
    meanwhile = None if at_once or hash_here else lambda: hashed.append(checksums(blocks))
    with TRACING.span("kvstrata.pull", kind=SpanKind.CLIENT):
        message = pb.Pull(
            reserve=link.reserve(request),
            region=blocks.region.id,
            descriptors=blocks.table.tobytes(),
            pieces=blocks.pieces,
            checksums=checksums(blocks).tobytes() if at_once else b"",
            hash_here=hash_here,
        ).SerializeToString()
        frame = link.channel.call(Kind.PULL, message, request.deadline, meanwhile=meanwhile)
        reply = expect(pb.ReserveOk, frame, Kind.RESERVE_OK)
    status[:] = statuses(reply.status, len(status), BlockStatus.REFUSED)
    durable[:] = flags(reply.durable, len(status))
    if _RESERVED not in reply.status:
        return
    granted = np.flatnonzero(status == _RESERVED)
    if hash_here:
        own = np.zeros(len(granted), np.uint64)
    else:  # a node may grant a pull that was to commit at once, too
        own = (hashed[-1] if hashed else checksums(blocks))[granted]
    _commit(link, request, reply.reservation, granted, own, status, durable)


def _commit(
    link: NodeLink,
    request: Push,
    reservation: int,
    granted: npt.NDArray[np.intp],
    own: npt.NDArray[np.uint64],
    status: StatusArray,
    durable: Mask,
) -> None:
    with TRACING.span("kvstrata.commit", kind=SpanKind.CLIENT):
        commit = pb.Commit(reservation=reservation, checksums=own.tobytes(), trace=TRACING.here())
        frame = link.channel.call(Kind.COMMIT, commit.SerializeToString(), request.deadline)
        done = expect(pb.CommitOk, frame, Kind.COMMIT_OK)
    status[granted] = statuses(done.status, len(granted), BlockStatus.REFUSED)
    durable[granted] = flags(done.durable, len(granted))


def _pull_ranges(link: NodeLink, request: Push, ranges: list[BlockView], status: StatusArray, durable: Mask) -> None:
    """As :func:`pull`, range after range as the blocks are written. What its writer gives up is ABORTED.

    Raises :class:`KVError`, with everything undecided where the node was not asked to commit.
    """
    assert request.written is not None
    hashed, granted = RangeChecksums(len(status)), np.arange(len(status))
    reservation = at = 0
    try:
        for part, whole in enumerate(ranges):
            if not request.written(part, request.deadline):
                status[granted] = BlockStatus.ABORTED
                if reservation:
                    link.abort(reservation)
                return
            blocks = whole if len(granted) == len(whole) else whole[granted]
            reply = _pull_range(link, request, blocks, hashed, reservation, at)
            ended = reply.status or bytes((BlockStatus.ABORTED,)) * len(granted)
            got = statuses(ended, len(granted), BlockStatus.REFUSED)
            at += whole.block_bytes
            if not part:
                status[:], durable[:] = got, flags(reply.durable, len(status))
                granted, reservation = np.flatnonzero(got == _RESERVED), reply.reservation
                hashed.keep(granted)
                if not len(granted):
                    return
            elif not reply.reservation:
                status[granted] = got
                return
    except BaseException:
        status[:], durable[:] = BlockStatus.UNKNOWN, False
        if reservation:
            link.abort(reservation)
        raise
    _commit(link, request, reservation, granted, hashed.values(), status, durable)


def _pull_range(
    link: NodeLink, request: Push, blocks: BlockView, hashed: RangeChecksums, reservation: int, at: int
) -> pb.ReserveOk:
    """The first one reserves."""
    with TRACING.span("kvstrata.pull", kind=SpanKind.CLIENT):
        message = pb.Pull(
            reserve=None if reservation else link.reserve(request),
            region=blocks.region.id,
            descriptors=blocks.table.tobytes(),
            pieces=blocks.pieces,
            reservation=reservation,
            at=at,
            nbytes=blocks.block_bytes,
        )
        hashing = [partial(hashed.add, blocks)]

        def hash_once() -> None:
            while hashing:
                hashing.pop()()

        # A call that is made again on another connection calls this again.
        frame = link.channel.call(Kind.PULL, message.SerializeToString(), request.deadline, meanwhile=hash_once)
        hash_once()
        return expect(pb.ReserveOk, frame, Kind.RESERVE_OK)

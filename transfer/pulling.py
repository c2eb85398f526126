"""Stores that a node takes by itself out of registered memory: one round trip to pull, one to commit.

The writer hashes while the node copies. It commits only after the node has said that all bytes were read, so what a
node reads after its writer has given up is never stored.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Mask, Push, StatusArray
from kvstrata.transfer.checksums import checksums
from kvstrata.transfer.connection import expect
from kvstrata.transfer.link import NodeLink
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
    with TRACING.span("kvstrata.commit", kind=SpanKind.CLIENT):
        commit = pb.Commit(reservation=reply.reservation, checksums=own.tobytes(), trace=TRACING.here())
        frame = link.channel.call(Kind.COMMIT, commit.SerializeToString(), request.deadline)
        done = expect(pb.CommitOk, frame, Kind.COMMIT_OK)
    status[granted] = statuses(done.status, len(granted), BlockStatus.REFUSED)
    durable[granted] = flags(done.durable, len(granted))

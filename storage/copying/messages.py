"""Copies as they travel: a master's order, and a source's answer, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import InvalidArgument, ProtocolError
from kvstrata.proto.keys import HASHES_MAX, Namespace, check_salt
from kvstrata.proto.status import BlockStatus, CopyReason, Tier
from kvstrata.storage.copying.book import Answer, Copy
from kvstrata.storage.copying.intake import Told
from kvstrata.transfer.base import Endpoint

#: An order's time when its master gives none.
ORDER_S: Final = 60.0


def copy_of(message: control.CopyCommand, leader_epoch: int, answer: Answer, now: float) -> Copy:
    """An order of a master that leads in ``leader_epoch``. Raises :class:`KVError` for what cannot be carried out."""
    namespace = Namespace.from_spec(message.spec)
    check_salt(message.salt)
    count, rest = divmod(len(message.hashes), namespace.hash_bytes)
    if rest or not 1 <= count <= HASHES_MAX:
        raise InvalidArgument(f"{len(message.hashes)} bytes of hashes: 1 to {HASHES_MAX} whole ones")
    try:
        tier, reason = Tier(message.tier), CopyReason(message.reason)
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    source = message.source
    width = namespace.hash_bytes
    return Copy(
        number=(leader_epoch, message.command),
        source=Endpoint(source.node_id, source.incarnation, source.channel, source.unix_path, source.boot_id),
        namespace=namespace,
        salt=message.salt,
        hashes=[message.hashes[row * width : (row + 1) * width] for row in range(count)],
        epoch=message.epoch,
        tier=tier,
        reason=reason,
        deadline=now + (message.deadline_ms / 1e3 or ORDER_S),
        answer=answer,
    )


def granted_of(
    reply: pb.AcquireOk, copy: Copy, positions: Sequence[int], raw_bytes: int
) -> tuple[list[int], list[Told]]:
    """(positions that come, what is said of each). Raises :class:`ProtocolError` for an answer that is none."""
    if len(reply.status) != len(positions):
        raise ProtocolError(f"{len(reply.status)} statuses for {len(positions)} blocks")
    granted = [
        position for position, status in zip(positions, reply.status, strict=True) if status == BlockStatus.LOADED
    ]
    width, count = copy.namespace.hash_bytes, len(granted)
    expected = (count * 8, count * width, count * 4, count * 4, count * copy.namespace.block_bytes)
    found = (len(reply.checksum), len(reply.before), len(reply.index), len(reply.idle_ms), raw_bytes)
    if found != expected:
        raise ProtocolError(f"an answer of {found} bytes for {count} blocks to copy: expected {expected}")
    checksums = np.frombuffer(reply.checksum, "<u8").tolist()
    index = np.frombuffer(reply.index, "<u4").tolist()
    idle_ms = np.frombuffer(reply.idle_ms, "<u4").tolist()
    nothing = bytes(width)
    told = []
    for row in range(count):
        before = reply.before[row * width : (row + 1) * width]
        told.append(Told(checksums[row], b"" if before == nothing else before, index[row], idle_ms[row] / 1e3))
    return granted, told

"""Which errors refuse a whole call, and what the others mean for the blocks they stopped."""

from __future__ import annotations

from typing import Final

from kvstrata.proto.errors import (
    Busy,
    Closed,
    Corrupt,
    FingerprintMismatch,
    ForbiddenSalt,
    InvalidArgument,
    KVError,
    LeaseExpired,
    QuotaExceeded,
    Unavailable,
    VersionMismatch,
)
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.frames import Late

#: Raised to the caller: the call as it stands is wrong, or this client may not make it.
WHOLE_CALL: Final = (ForbiddenSalt, FingerprintMismatch, VersionMismatch, InvalidArgument, Closed)

_MEANING: Final[tuple[tuple[type[KVError], BlockStatus], ...]] = (
    (Late, BlockStatus.LATE),
    (Busy, BlockStatus.LATE),
    (LeaseExpired, BlockStatus.LEASE_LOST),
    (Corrupt, BlockStatus.CORRUPT),
    (Unavailable, BlockStatus.NODE_LOST),
    (QuotaExceeded, BlockStatus.QUOTA),
)


def status_of(error: KVError) -> BlockStatus:
    """What a block's status is when ``error`` stopped it; anything unforeseen is REFUSED, and a miss."""
    for kind, status in _MEANING:
        if isinstance(error, kind):
            return status
    return BlockStatus.REFUSED


def unanswered(error: KVError) -> BlockStatus:
    """What blocks are when the directory could not be asked about them: LATE, or NODE_LOST."""
    return status_of(error) if isinstance(error, Unavailable | Busy) else BlockStatus.NODE_LOST

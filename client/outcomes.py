"""Which errors refuse a whole call, and what the others mean for the blocks they stopped."""

from __future__ import annotations

from typing import Final

from kvstrata.proto.errors import (
    Busy,
    Closed,
    Corrupt,
    FingerprintMismatch,
    Forbidden,
    InvalidArgument,
    KVError,
    LeaseExpired,
    QuotaExceeded,
    TicketExpired,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.frames import Late

log = get_logger(__name__)

#: Raised to the caller: the call as it stands is wrong, or this client may not make it.
WHOLE_CALL: Final = (Unauthenticated, Forbidden, FingerprintMismatch, VersionMismatch, InvalidArgument, Closed)

_MEANING: Final[tuple[tuple[type[KVError], BlockStatus], ...]] = (
    (Late, BlockStatus.LATE),
    (Busy, BlockStatus.LATE),
    (LeaseExpired, BlockStatus.LEASE_LOST),
    (Corrupt, BlockStatus.CORRUPT),
    (Unavailable, BlockStatus.NODE_LOST),
    (TicketExpired, BlockStatus.NODE_LOST),
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


def refused_late(what: str, error: Exception) -> None:
    """Log an error that ended a call of which something is pending. Raised it would hide that memory is in use, so
    the call returns. Anything but a :class:`KVError` is a mistake in this program: with its traceback."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, KVError):
        log.warning("a call was refused while a transfer was under way", call=what, reason=text)
    else:
        log.error("a call failed while a transfer was under way", call=what, reason=text, exc_info=error)

"""Why a block was not found: one list of reasons, for counters, logs and people."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kvstrata.proto.status import Departure


class MissReason(IntEnum):
    """Small numbers: the directory keeps one for each block that left. Names in lower case are labels.

    Below ``LEFT_REASONS`` are the reasons for which a block left; the others are worked out when asked.
    """

    NEVER_STORED = 0  #: nothing is remembered of it
    EVICTED_ROOM = 1  #: its node was full, and it was its turn
    EVICTED_QUOTA = 2  #: its tenant's share was full
    LOWERED = 3  #: its tenant's share was lowered
    DEVICE = 4  #: its device failed
    CORRUPT = 5  #: its bytes did not match
    REMOVED = 6  #: a client removed it
    DROPPED = 7  #: its tenant or namespace was dropped
    EPOCH = 8  #: its weights are of the past
    HINTED = 9  #: its owner said that it may leave
    ORPHANED = 10  #: its prefix had left before it
    EVICTED = 11  #: it left, and the node did not say why
    NODE_LOST = 12  #: the only nodes that had it went away
    SURPLUS = 13  #: it had more replicas than were asked for, and the others are gone since
    IN_FLIGHT = 16  #: a writer was sent off with it
    NOT_YET = 17  #: a node that may have it has not come back since the master's start
    UNROUTABLE = 18  #: its only nodes may not be read from now
    SHARD_MISSING = 19  #: this shard is there, a sister is not
    LOAD_FAILED = 20  #: a reader went there and did not get it
    # The rest are answers to "why?", never counted in lookups.
    PARTIAL_BLOCK = 21  #: every whole block was there; what is past the last one is not stored
    OTHER_SALT = 22  #: another tenant has the same hash
    OTHER_FINGERPRINT = 23  #: another namespace has the same hash
    REFUSED_AT_STORE = 24  #: a node would not take it

    @property
    def label(self) -> str:
        return self.name.lower()


#: Reasons that are kept for a block that left are below this.
LEFT_REASONS: Final = 16
#: One more than the largest reason.
REASONS: Final = max(MissReason) + 1
#: Reasons that lookups count.
COUNTED: Final = tuple(reason for reason in MissReason if reason <= MissReason.LOAD_FAILED)

_DEPARTED: Final = {
    Departure.ROOM: MissReason.EVICTED_ROOM,
    Departure.QUOTA: MissReason.EVICTED_QUOTA,
    Departure.LOWERED: MissReason.LOWERED,
    Departure.DEVICE: MissReason.DEVICE,
    Departure.CORRUPT: MissReason.CORRUPT,
    Departure.REMOVED: MissReason.REMOVED,
    Departure.DROPPED: MissReason.DROPPED,
    Departure.EPOCH: MissReason.EPOCH,
    Departure.HINT: MissReason.HINTED,
    Departure.ORPHAN: MissReason.ORPHANED,
    Departure.SURPLUS: MissReason.SURPLUS,
}


def departed(departure: int) -> MissReason:
    """The reason for a node's ``Departure``; one that this master does not know is ``EVICTED``."""
    try:
        return _DEPARTED.get(Departure(departure), MissReason.EVICTED)
    except ValueError:
        return MissReason.EVICTED

"""Small enums that travel on the wire: what became of a block, where it is, what placement says."""

from __future__ import annotations

import struct
from enum import IntEnum


class BlockStatus(IntEnum):
    """What became of one block of a call. Values are wire format: never renumber.

    ======== ============================================================================
    below 10 the block is where the caller wanted it
    10-19    on its way
    20-39    a miss: compute it
    40-59    not stored: a later store may succeed
    ======== ============================================================================
    """

    UNKNOWN = 0  #: not tried (never in a finished result)
    STORED = 1
    ALREADY_PRESENT = 2
    LOADED = 3
    RESERVED = 10  #: granted to this writer
    IN_FLIGHT = 11  #: another writer is storing it
    MISSING = 20  #: no node has it
    EVICTED = 21  #: the directory named a node, and the node no longer had it
    LEASE_LOST = 22  #: the lease ended, or the slot changed, before the copy did
    CORRUPT = 23  #: the bytes did not match their checksum
    NODE_LOST = 24  #: the node was unreachable or fell silent
    LATE = 25  #: the deadline passed
    NOT_YET = 26  #: the directory is still being rebuilt
    NO_ROOM = 27  #: on SSD, and no memory could be had to read it into
    READ_ERROR = 28  #: on SSD, and the device did not give it back
    PENDING = 29  #: late, and a one-sided transfer may still write to its memory: not to be reused until it has settled
    QUOTA = 40  #: the tenant is at its limit
    FULL = 41  #: no room, and nothing evictable
    REFUSED = 42  #: the node refused it; the log has the reason
    ABORTED = 43  #: the write was given up


HELD = frozenset({BlockStatus.STORED, BlockStatus.ALREADY_PRESENT, BlockStatus.LOADED})


class Tier(IntEnum):
    """Where a replica is. Values are wire format (two bits in a location code)."""

    DRAM = 0
    SSD = 1
    HBM = 2


class PlaceState(IntEnum):
    """What placement says of one block."""

    NEW = 0  #: store it on the named node
    PRESENT = 1  #: the named node has it
    IN_FLIGHT = 2  #: another writer was sent to the named node with it
    NOWHERE = 3  #: no active node has room


class Departure(IntEnum):
    """Why a block left a tier of a node. Values are wire format: never renumber."""

    UNKNOWN = 0  #: not told (a node of an earlier version)
    ROOM = 1  #: the node was full, and the block was its turn
    QUOTA = 2  #: its tenant's share was full
    LOWERED = 3  #: its tenant's share was lowered
    DEVICE = 4  #: its device failed
    CORRUPT = 5  #: its bytes did not match
    REMOVED = 6  #: a client removed it
    DROPPED = 7  #: its tenant or namespace was dropped
    EPOCH = 8  #: its weights are of the past
    HINT = 9  #: its owner said that it may leave
    ORPHAN = 10  #: its prefix had left before it
    SURPLUS = 11  #: other nodes have it, and as many replicas were not asked for


class HintKind(IntEnum):
    """What a hint asks for. Values are wire format."""

    KEEP = 1  #: leave after all others of the same tenant, until the time is over
    FORGET = 2  #: no longer keep
    DROP = 3  #: leave first


class CopyReason(IntEnum):
    """Why a node is told to take a copy. Values are wire format."""

    REPLICA = 1  #: the block has fewer replicas than its tenant or namespace asks for
    DRAIN = 2  #: its node is leaving
    HOT = 3  #: its node is busy with it


#: One granted slot in an AcquireOk, little-endian: slab u32, slot u32 (index into the slab's generation
#: table), byte offset in the slab's memfd u64, generation u64, checksum u64 (xxh3_64).
SLOT_ROW = struct.Struct("<IIQQQ")

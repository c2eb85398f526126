"""What calls return. A miss is a value here, with its reason; arrays run over the blocks of the call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.transfer.base import Landing

Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.uint8]

#: In ``tiers``: no tier, because the block is not there or was not loaded.
NO_TIER: Final = 255

_NAMES: Final = {int(status): status.name.lower() for status in BlockStatus}
_TIER_NAMES: Final = {int(tier): tier.name.lower() for tier in Tier}
_LOADED: Final = int(BlockStatus.LOADED)
_STORED: Final = int(BlockStatus.STORED)
_PRESENT: Final = int(BlockStatus.ALREADY_PRESENT)


def reasons_of(status: Codes) -> dict[str, int]:
    """How many blocks ended how: status name in lower case -> count. The counts add up to n."""
    packed = status.tobytes()
    if packed and packed.count(packed[0]) == len(packed):  # most often they all ended alike
        return {_NAMES.get(packed[0]) or f"status_{packed[0]}": len(packed)}
    counts = np.bincount(status)
    return {_NAMES.get(code, f"status_{code}"): int(counts[code]) for code in np.flatnonzero(counts).tolist()}


class Lookup(msgspec.Struct, frozen=True):
    """Where a prefix is, as the directory believes now. Pins nothing.

    ``hit_blocks``: length of the longest usable prefix (every shard has it); None means "not yet": the
    directory is being rebuilt, ask again. A directory that cannot be asked answers 0 with ``answered``
    False. ``shard_hit_blocks``: the same for this namespace's shard alone. ``present`` bool[n], ``tiers``
    u8[n] (``NO_TIER`` where absent). ``reasons``: "present", "missing", "not_yet", "node_lost" (no master
    reachable) or "late" -> blocks.
    """

    hit_blocks: int | None
    present: Mask
    tiers: Codes
    reasons: dict[str, int]
    shard_hit_blocks: int = 0
    answered: bool = True
    seconds: float = 0.0


class LoadResult(msgspec.Struct, frozen=True):
    """What became of each block of a load: rows of the destination are good exactly where ``loaded``.

    ``loaded`` bool[n], ``status`` u8[n] (:class:`BlockStatus`), ``reasons`` name -> count, ``tiers`` u8[n]: where
    a block was when it was asked for (``NO_TIER`` where not loaded). Rows that are PENDING may still be written to
    until :meth:`settled`: they must not be reused before.
    """

    loaded: Mask
    status: Codes
    reasons: dict[str, int]
    tiers: Codes
    seconds: float
    bytes_moved: int = 0
    pending: tuple[Landing, ...] = ()

    @classmethod
    def of(
        cls, status: Codes, tiers: Codes, seconds: float, bytes_moved: int, pending: tuple[Landing, ...] = ()
    ) -> LoadResult:
        return cls(status == _LOADED, status, reasons_of(status), tiers, seconds, bytes_moved, pending)

    def settled(self, deadline: float | None = None) -> bool:
        """True once no row can be written to any more; waits for that until ``deadline`` (monotonic seconds), if one
        is given. Always true when no row is PENDING."""
        return all_settled(self.pending, deadline)

    @property
    def hit_blocks(self) -> int:
        """Length of the loaded prefix."""
        return prefix(self.loaded)

    def by_tier(self) -> dict[str, int]:
        """Loaded blocks by the tier they came from."""
        found, counts = np.unique(self.tiers[self.loaded], return_counts=True)
        pairs = zip(found.tolist(), counts.tolist(), strict=True)
        return {_TIER_NAMES.get(tier, f"tier_{tier}"): int(count) for tier, count in pairs}


class StoreResult(msgspec.Struct, frozen=True):
    """What became of each block of a store. ``stored``: the pool holds it now (also if it already did).

    ``stored`` bool[n], ``status`` u8[n] (:class:`BlockStatus`), ``reasons`` name -> count, ``durable`` bool[n]:
    payload and header are flushed to SSD, so that the block outlives its node's process. Rows that are PENDING may
    still be read until :meth:`settled`; what is read late is never stored.
    """

    stored: Mask
    status: Codes
    reasons: dict[str, int]
    seconds: float
    bytes_moved: int
    durable: Mask
    pending: tuple[Landing, ...] = ()

    @classmethod
    def of(
        cls,
        status: Codes,
        seconds: float,
        bytes_moved: int,
        durable: Mask | None = None,
        pending: tuple[Landing, ...] = (),
    ) -> StoreResult:
        stored = (status == _STORED) | (status == _PRESENT)
        flushed = np.zeros(len(status), bool) if durable is None else durable & stored
        return cls(stored, status, reasons_of(status), seconds, bytes_moved, flushed, pending)

    def settled(self, deadline: float | None = None) -> bool:
        """As :meth:`LoadResult.settled`, of rows that may still be read."""
        return all_settled(self.pending, deadline)


class RemoveResult(msgspec.Struct, frozen=True):
    """``removed``: blocks the directory knew. ``unreached``: nodes that have not confirmed yet; the master
    keeps their tombstones. ``answered`` is False when no master took the removal: call again."""

    removed: int
    unreached: tuple[str, ...] = ()
    answered: bool = True

    @property
    def complete(self) -> bool:
        """Every node has confirmed: no copy can come back."""
        return self.answered and not self.unreached


def all_settled(pending: Iterable[Landing], deadline: float | None = None) -> bool:
    """Whether no byte of these can move any more; waits until ``deadline``, if one is given."""
    if deadline is None:
        return all(one.settled() for one in pending)
    return all(one.wait(deadline) for one in pending)


def prefix(mask: Mask) -> int:
    """Length of the leading run of True."""
    return len(mask) if mask.all() else int(mask.argmin())

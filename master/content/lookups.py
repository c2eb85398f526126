"""Answers to lookups, and a record of the named ones, so that a request can be explained later."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.content.misses import LEFT_REASONS, REASONS, MissReason
from kvstrata.master.directory.directory import Directory, Found, TableKey
from kvstrata.master.directory.probing import FEW, Keys

#: Named lookups remembered, and hashes in all of them: the oldest go first.
REQUESTS_MAX: Final = 8192
KEYS_MAX: Final = 1 << 20
REQUEST_CHARACTERS_MAX: Final = 200

Reasons = npt.NDArray[np.uint8]  #: of :class:`MissReason`
_SHARD_MISSING: Final = int(MissReason.SHARD_MISSING)
NO_REASONS: Final[Reasons] = np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class LookedUp:
    """``reasons`` runs over the blocks that are not ``found.present``, in order of asking.

    ``not_yet``: something is missing that a node which has not come back yet may hold.
    """

    found: Found
    not_yet: bool
    reasons: Reasons

    def misses(self) -> npt.NDArray[np.int64]:
        """Blocks by :class:`MissReason`: with those present they are the blocks asked, exactly."""
        return np.bincount(self.reasons, minlength=REASONS)


@dataclass(frozen=True, slots=True)
class Asked:
    """A named lookup as it was answered at ``at`` (the owner's clock)."""

    request: str
    group: str
    table: TableKey
    keys: Keys
    hit_blocks: int
    reason: MissReason | None  #: of the block at which the prefix ended; None when all was there
    at: float


def nothing_found(count: int, reason: MissReason) -> LookedUp:
    """The answer when nothing is looked for, as nothing may be found."""
    codes = np.zeros(count, dtype=np.uint16)
    found = Found(codes, np.zeros(count, dtype=np.bool_), 0, 0, np.zeros(count, dtype=np.uint32))
    return LookedUp(found, False, np.full(count, reason, dtype=np.uint8))


def reasons_of(directory: Directory, table: TableKey, keys: Keys, found: Found) -> tuple[Reasons, Keys]:
    """Why each block that is not present is not, and the keys of those blocks.

    One look at an array a block; blocks that nothing is known of are looked for in the grave of ``table``.
    """
    if len(keys) <= FEW and directory.graves.find(table) is None:
        return _reasons_of_few(directory, keys, found)
    missing = np.flatnonzero(~found.present)
    reasons = directory.reasons(found.ids[missing])
    reasons[found.codes[missing] != 0] = MissReason.SHARD_MISSING
    keys = keys if len(missing) == len(keys) else keys[missing]
    grave = directory.graves.find(table)
    if grave is not None:
        unknown = np.flatnonzero(reasons == MissReason.NEVER_STORED)
        reasons[unknown[directory.graves.holds(table, keys[unknown])]] = grave.reason
    return reasons, keys


def _reasons_of_few(directory: Directory, keys: Keys, found: Found) -> tuple[Reasons, Keys]:
    """As :func:`reasons_of`, in plain integers, where the table has no grave."""
    kept, codes = directory.reasons(found.ids).tolist(), found.codes.tolist()
    missing = [position for position, present in enumerate(found.present.tolist()) if not present]
    reasons = [_SHARD_MISSING if codes[position] else kept[position] for position in missing]
    return np.array(reasons, dtype=np.uint8), keys if len(missing) == len(keys) else keys[missing]


def left(reasons: Reasons, keys: Keys) -> tuple[npt.NDArray[np.int64], Keys]:
    """Positions of the blocks that no node has, and their keys."""
    if len(keys) <= FEW:
        few = [position for position, reason in enumerate(reasons.tolist()) if reason < LEFT_REASONS]
        return np.array(few, dtype=np.int64), keys if len(few) == len(keys) else keys[few]
    gone = np.flatnonzero(reasons < LEFT_REASONS)
    return gone, keys if len(gone) == len(keys) else keys[gone]


class RequestLog:
    """The newest lookup of each request name, newest last."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, Asked] = OrderedDict()
        self._keys = 0

    def note(self, asked: Asked) -> None:
        """Remember it in place of an earlier one of that name."""
        before = self._all.pop(asked.request, None)
        if before is not None:
            self._keys -= len(before.keys)
        self._all[asked.request] = asked
        self._keys += len(asked.keys)
        while len(self._all) > REQUESTS_MAX or (self._keys > KEYS_MAX and len(self._all) > 1):
            self._keys -= len(self._all.popitem(last=False)[1].keys)

    def find(self, request: str) -> Asked | None:
        return self._all.get(request[:REQUEST_CHARACTERS_MAX])

    def __len__(self) -> int:
        return len(self._all)

    def check(self) -> None:
        assert self._keys == sum(len(asked.keys) for asked in self._all.values())

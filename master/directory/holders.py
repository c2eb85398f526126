"""Interned sets of holders: which (node slot, tier) pairs have a block, as one small id.

Millions of blocks share a handful of holder sets, so the directory stores an id a block, and changes and
questions are worked out once a set, then applied to arrays of ids.

A slot leaves all sets at once: their ids stand for what is left of them from then on. They are *retired*, for
another id stands for the same set, and go when no table has them any more.

A block that nobody has any more may have a *ghost* in place of its holders: a set of one code past all
holder codes, which says why it left (:mod:`kvstrata.master.directory.ghosts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.content.misses import LEFT_REASONS, MissReason
from kvstrata.master.directory.probing import Values

Ids = Values
Holders = tuple[int, ...]  #: sorted codes, see :func:`code_of`
Codes = npt.NDArray[np.uint16]
_Step = tuple[str, int, int]

#: Slots fit the two upper fields of a location code: 1 + 4 * slot + tier in 16 bits.
SLOTS_MAX: Final = 16_000
#: Stands in a set for a replica that a reader did not find; never routed, never sent.
HIDDEN: Final = 3
#: Codes from here on are ghosts: this, and a mark (see ghosts.py).
GHOST: Final = 4 * SLOTS_MAX
#: Below this many ids a loop beats array set-up.
_FEW: Final = 16


def code_of(slot: int, tier: int) -> int:
    """The holder code of a node slot's tier (a wire location code is one more)."""
    return slot * 4 + tier


class HolderSets:
    """Set id <-> sorted tuple of holder codes. Id 0 is the empty set."""

    def __init__(self) -> None:
        self._sets: list[Holders | None] = [()]
        self._ids: dict[Holders, int] = {(): 0}
        self._free: list[int] = []
        self._steps: dict[_Step, dict[int, int]] = {}
        self._retired: set[int] = set()
        self._current: Ids | None = None
        #: Grows whenever an id gets a new meaning: what was worked out for ids before is void.
        self.reuses = 0

    @property
    def size(self) -> int:
        """One more than the largest id in use."""
        return len(self._sets)

    def holders(self, set_id: int) -> Holders:
        found = self._sets[set_id]
        assert found is not None, f"holder set {set_id} was forgotten"
        return found

    def known(self, set_id: int) -> bool:
        """False for an id that was forgotten."""
        return self._sets[set_id] is not None

    @property
    def retired(self) -> frozenset[int]:
        """Ids that are to leave the tables (:meth:`mapping`)."""
        return frozenset(self._retired)

    @property
    def retired_any(self) -> bool:
        return bool(self._retired)

    def mapping(self) -> Ids:
        """For each id, the one that stands for the same set and is not retired: u32[size]."""
        if self._current is None or len(self._current) < self.size:
            self._current = np.arange(self.size, dtype=np.uint32)
            for set_id in self._retired:
                self._current[set_id] = self._ids[self.holders(set_id)]
        return self._current

    def current(self, ids: Ids) -> Ids:
        """The same sets, by ids that are not retired."""
        return self.mapping()[ids] if self._retired else ids

    def intern(self, holders: Holders) -> int:
        known = self._ids.get(holders)
        if known is not None:
            return known
        if self._free:
            fresh = self._free.pop()
            self.reuses += 1
            self._sets[fresh] = holders
        else:
            fresh = len(self._sets)
            self._sets.append(holders)
        self._ids[holders] = fresh
        return fresh

    # ------------------------------------------------------------------ transitions, id by id

    def with_holder(self, ids: Ids, slot: int, tier: int) -> Ids:
        """Each set plus (slot, tier); what was hidden of that slot is known again."""
        code, hidden = code_of(slot, tier), code_of(slot, HIDDEN)
        return self._apply(ids, ("add", code, 0), lambda held: {*_living(held), code} - {hidden})

    def without_holder(self, ids: Ids, slot: int, tier: int, mark: int) -> Ids:
        """Each set less (slot, tier), and less what was hidden of that slot; the last one leaves a ghost."""
        gone = {code_of(slot, tier), code_of(slot, HIDDEN)}
        ghost = GHOST + mark
        return self._apply(
            ids,
            ("remove", code_of(slot, tier), mark),
            lambda held: set(held) - gone or ({ghost} if held else set()),
        )

    def without_holders(self, ids: Ids, mark: int) -> Ids:
        """A ghost in place of each set that has holders."""
        ghost = GHOST + mark
        return self._apply(ids, ("clear", 0, mark), lambda held: {ghost} if _living(held) else set(held))

    def hidden(self, ids: Ids, slot: int) -> Ids:
        """Each set with every tier of ``slot`` replaced by a mark that is never routed."""
        codes = {code_of(slot, tier) for tier in range(HIDDEN)}
        mark = code_of(slot, HIDDEN)
        return self._apply(
            ids, ("hide", mark, 0), lambda held: (set(held) - codes) | {mark} if codes & set(held) else set(held)
        )

    def shown(self, ids: Ids, slot: int, tiers: int) -> Ids:
        """Each set that hides ``slot``, with the tiers of the bit mask ``tiers`` in its place."""
        codes = {code_of(slot, tier) for tier in range(HIDDEN) if tiers >> tier & 1}
        mark = code_of(slot, HIDDEN)
        return self._apply(
            ids, ("show", mark, tiers), lambda held: (set(held) - {mark}) | codes if mark in held else set(held)
        )

    def _apply(self, ids: Ids, step: _Step, change: Callable[[Holders], set[int]]) -> Ids:
        known = self._steps.setdefault(step, {})
        if ids.size <= _FEW:
            return np.array([self._after(set_id, known, change) for set_id in ids.tolist()], dtype=np.uint32)
        seen = np.flatnonzero(np.bincount(ids, minlength=1))
        mapping = np.zeros(int(seen[-1]) + 1, dtype=np.uint32)
        mapping[seen] = [self._after(set_id, known, change) for set_id in seen.tolist()]
        return mapping[ids]

    def _after(self, set_id: int, known: dict[int, int], change: Callable[[Holders], set[int]]) -> int:
        after = known.get(set_id)
        if after is None:
            held = self.holders(set_id)
            left = tuple(sorted(change(held)))
            after = known[set_id] = set_id if left == held else self.intern(left)
        return after

    # ------------------------------------------------------------------ whole-directory changes

    def drop_slot(self, slot: int, mark: int | None = None) -> list[int]:
        """Take ``slot`` out of every set, and retire their ids. Returns those of which no holder is left.

        They stand for a ghost with ``mark`` from now on, or with None for the empty set.
        """
        rest = () if mark is None else (GHOST + mark,)
        named = [set_id for set_id, held in enumerate(self._sets) if any(code >> 2 == slot for code in held or ())]
        for set_id in named:
            held = self.holders(set_id)
            if set_id not in self._retired:
                del self._ids[held]
            self._sets[set_id] = tuple(code for code in held if code >> 2 != slot) or rest
        self._retired.update(named)
        for set_id in named:
            self.intern(self.holders(set_id))
        if named:
            self._void()
            self.reuses += 1
        return [set_id for set_id in named if not self.held(set_id)]

    def forget(self, set_ids: Collection[int]) -> None:
        """Free these ids; no table may use one any more."""
        for set_id in set_ids:
            if set_id not in self._retired:
                del self._ids[self.holders(set_id)]
            self._retired.discard(set_id)
            self._sets[set_id] = None
            self._free.append(set_id)
        self._void()

    def _void(self) -> None:
        self._steps.clear()
        self._current = None

    # ------------------------------------------------------------------ questions

    def held(self, set_id: int) -> bool:
        """Whether a set has any holder; False for a ghost."""
        return bool(self.visible(set_id))

    def mark_of(self, set_id: int) -> int | None:
        """The mark of a ghost; None for a set of holders."""
        held = self._sets[set_id]
        return held[0] - GHOST if held and held[0] >= GHOST else None

    def reasons(self) -> npt.NDArray[np.uint8]:
        """Why a block with each id is not found, if it is not routed to: u8[size] of :class:`MissReason`."""
        return np.array([self._reason(held or ()) for held in self._sets], dtype=np.uint8)

    def _reason(self, held: Holders) -> int:
        if not held:
            return MissReason.NEVER_STORED
        if held[0] >= GHOST:
            return (held[0] - GHOST) % LEFT_REASONS
        return MissReason.LOAD_FAILED if all(code & 3 == HIDDEN for code in held) else MissReason.UNROUTABLE

    def tiers_of(self, ids: Ids, slot: int) -> npt.NDArray[np.uint8]:
        """Bit mask of the tiers in which ``slot`` visibly holds each block: u8[n]."""
        masks = np.zeros(self.size, dtype=np.uint8)
        for set_id in np.unique(ids).tolist():
            for code in self.holders(set_id):
                if code >> 2 == slot and code & 3 != HIDDEN:
                    masks[set_id] |= 1 << (code & 3)
        return masks[ids]

    def hides(self, ids: Ids, slot: int) -> npt.NDArray[np.bool_]:
        """Whether ``slot`` is hidden in each set: bool[n]."""
        mark = code_of(slot, HIDDEN)
        hiding = [set_id for set_id in np.unique(ids).tolist() if mark in self.visible(set_id)]
        return np.isin(ids, hiding)

    def visible(self, set_id: int) -> Holders:
        """The codes in a set, hidden ones included, a ghost left out; () for a forgotten id."""
        return _living(self._sets[set_id] or ())

    def check(self) -> None:
        """Assert that ids and sets are one to one, and freed ids are free."""
        live = {set_id: held for set_id, held in enumerate(self._sets) if held is not None}
        assert self._retired <= live.keys() and 0 not in self._retired
        standing = {set_id: held for set_id, held in live.items() if set_id not in self._retired}
        assert self._ids == {held: set_id for set_id, held in standing.items()} and len(self._ids) == len(standing)
        assert all(live[set_id] in self._ids for set_id in self._retired), "a retired id stands for an unknown set"
        assert self.mapping().tolist() == [
            self._ids[held] if (held := live.get(set_id)) is not None else set_id for set_id in range(self.size)
        ]
        assert sorted(self._free) == [set_id for set_id, held in enumerate(self._sets) if held is None]
        assert all(held == tuple(sorted(set(held))) for held in live.values())
        assert all(len(held) == 1 or held[-1] < GHOST for held in live.values() if held), "a ghost beside holders"


def _living(held: Holders) -> Holders:
    """The holders, without a ghost."""
    return () if held and held[0] >= GHOST else held

"""Where new blocks go: same host first, else the roomier of two random nodes, in runs.

The directory and the nodes' reports come in from outside, randomness too. The only memory here is the
soft intents: which node a block was sent to in the last half minute, so that a second writer of the same
block is told instead of sent.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.candidates import Candidates, Positions, SlotMask
from kvstrata.master.directory.holders import Codes, code_of
from kvstrata.master.directory.probing import FEW, Keys, Values
from kvstrata.master.directory.table import Table
from kvstrata.proto.status import PlaceState

INTENT_S: Final = 30.0
#: Intents remembered at most, twice this while two generations overlap: the older are forgotten first.
INTENTS_MAX: Final = 1 << 20
#: Blocks of one call that go to one node together. A load of a long prefix can then use several nodes.
RUN_BLOCKS: Final = 64
#: ... but not of very many, as one of them may be slow.
STRIPE_NODES_MAX: Final = 8
#: An intent is a node (15 bits), the writer's tag (9) and a time in half seconds (8): it is looked at for two minutes
#: at most, in which the time does not wrap.
_TICKS_A_SECOND: Final = 2
_TICK_BITS: Final = 8
_TICK_MASK: Final = (1 << _TICK_BITS) - 1
_WRITER_BITS: Final = 9
_WRITER_MASK: Final = (1 << _WRITER_BITS) - 1
_SLOT_SHIFT: Final = _TICK_BITS + _WRITER_BITS
_PRESENT, _NEW, _IN_FLIGHT, _NOWHERE = (
    int(state) for state in (PlaceState.PRESENT, PlaceState.NEW, PlaceState.IN_FLIGHT, PlaceState.NOWHERE)
)


@dataclass(frozen=True, slots=True)
class Placed:
    """``codes`` u16[n] (1 + 4 * slot; 0 nowhere) and ``states`` u8[n] (:class:`PlaceState`).

    ``sole``: the slot of the one node that everything goes to, whatever is asked next; None while there is a choice.
    """

    codes: Codes
    states: npt.NDArray[np.uint8]
    sole: int | None = None

    def new_blocks(self) -> Mapping[int, int]:
        """Blocks that the writer is to store, by location code."""
        if len(self.codes) <= FEW:
            counts: dict[int, int] = {}  # a Counter takes longer to make than to fill
            for code, state in zip(self.codes.tolist(), self.states.tolist(), strict=True):
                if state == _NEW:
                    counts[code] = counts[code] + 1 if code in counts else 1
            return counts
        return Counter(self.codes[self.states == _NEW].tolist())


def writer_tag(session: bytes) -> int:
    """A writer's mark on its intents, 1 to 511, from its session. Two that share one are told to store the same block:
    the node tells the second."""
    return 1 + zlib.crc32(session) % _WRITER_MASK


class Placement:
    """Decides, and remembers intents. ``rng`` is the only source of chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._intents = Table()
        self._older = Table()
        self._rotated_at = 0.0

    def place(
        self,
        keys: Keys,
        scope: Keys,
        present: Codes,
        candidates: Candidates,
        boot_id: str,
        now: float,
        writer: int = 0,
    ) -> Placed:
        """One decision a block.

        ``present`` is the directory's answer (u16[n]); ``scope`` (u64[1, 2]) tells apart equal hashes of
        different tenants and shards. A block without a node gets ``NOWHERE`` only when no node is active.
        ``writer`` (:func:`writer_tag`; 0: unknown) is sent to the same node again with a block that it was sent off
        with before: its first answer may have been lost, or came too late.
        """
        if len(keys) <= FEW:
            return self._place_few(keys, scope, present, candidates, boot_id, now, writer)
        codes = np.where(present != 0, (present - np.uint16(1)) // 4 * 4 + 1, 0).astype(np.uint16)
        states = np.where(present != 0, np.uint8(PlaceState.PRESENT), np.uint8(PlaceState.NEW))
        absent = np.flatnonzero(present == 0)
        if not absent.size:
            return Placed(codes, states)
        if not len(candidates):
            states[absent] = PlaceState.NOWHERE
            return Placed(codes, states)
        self._rotate(now)
        scoped = keys[absent] ^ scope
        noted = self._noted(scoped, now)
        if not noted.any():
            codes[absent] = self._choose(absent, candidates, boot_id)
            self._intents.add(scoped, _intents_of(codes[absent], now, writer))
            return Placed(codes, states)
        intended, writers = _read(noted, candidates.mask, now)
        codes[absent] = intended
        others = (intended != 0) & ((writers != writer) | (writer == 0))
        states[absent[others]] = PlaceState.IN_FLIGHT
        fresh = intended == 0
        new = absent[fresh]
        if new.size:
            codes[new] = self._choose(new, candidates, boot_id)
            self._intents.put(scoped[fresh], _intents_of(codes[new], now, writer))
        return Placed(codes, states)

    def _place_few(
        self,
        keys: Keys,
        scope: Keys,
        present: Codes,
        candidates: Candidates,
        boot_id: str,
        now: float,
        writer: int,
    ) -> Placed:
        """As :meth:`place`, in plain integers, for blocks that are one run at most."""
        codes = [(code - 1) // 4 * 4 + 1 if code else 0 for code in present.tolist()]
        states = [_PRESENT if code else _NOWHERE for code in codes]
        absent = [at for at, code in enumerate(codes) if not code]
        if absent and len(candidates):
            self._rotate(now)
            scoped = (keys ^ scope).tolist()
            fresh = []
            for at in absent:
                low, high = scoped[at]
                codes[at], whose = self._intent(low, high, candidates.mask, now)
                if not codes[at]:
                    fresh.append(at)
                states[at] = _IN_FLIGHT if codes[at] and (whose != writer or not writer) else _NEW
            if fresh:
                slot = self._choose_one(candidates, boot_id)
                intent = slot + 1 << _SLOT_SHIFT | writer << _TICK_BITS | _tick(now)
                code, placed = 1 + code_of(slot, 0), {}
                for at in fresh:
                    codes[at], (low, high) = code, scoped[at]
                    placed[low, high] = intent
                self._intents.put_few(placed)
        return Placed(np.array(codes, dtype=np.uint16), np.array(states, dtype=np.uint8))

    # ------------------------------------------------------------------ choice

    def _choose_one(self, candidates: Candidates, boot_id: str) -> int:
        """The slot of a node for one run."""
        return candidates.slot(self._stripe(candidates, boot_id, 1)[0])

    def _choose(self, positions: npt.NDArray[np.int64], candidates: Candidates, boot_id: str) -> Codes:
        """A node for each run of ``RUN_BLOCKS`` positions of the call."""
        runs = positions // RUN_BLOCKS
        first, last = int(runs[0]), int(runs[-1])
        stripe = self._stripe(candidates, boot_id, last - first + 1)
        codes = [1 + code_of(candidates.slot(position), 0) for position in stripe]
        if len(codes) == 1:
            return np.full(len(positions), codes[0], dtype=np.uint16)
        turns = _in_turns(candidates.weights()[stripe].tolist(), last - first + 1)
        return np.array(codes, dtype=np.uint16)[turns][runs - first]

    def _stripe(self, candidates: Candidates, boot_id: str, runs: int) -> list[int]:
        """Positions of the nodes that the runs of one call go to: those of the writer's host if it has headroom."""
        pool = candidates.positions()
        if len(pool) == 1:
            return [int(pool[0])]
        near = candidates.near(boot_id)
        if near:
            here = max(map(candidates.ramp_of, near))
            if self._rng.random() * candidates.highest_ramp() < here:
                pool = np.array(near)
        stripe = [self._two_choices(candidates, pool)]
        for _ in range(1, min(runs, STRIPE_NODES_MAX, len(pool))):
            pool = pool[pool != stripe[-1]]
            stripe.append(self._two_choices(candidates, pool))
        return stripe

    def _two_choices(self, candidates: Candidates, pool: Positions) -> int:
        if len(pool) == 1:
            return int(pool[0])
        weights = candidates.weights()
        below = np.cumsum(weights if len(pool) == len(weights) else weights[pool])
        drawn = [self._rng.random() * float(below[-1]) for _ in range(2)]
        one, other = map(int, pool[np.searchsorted(below[:-1], drawn, side="right")])
        worth = [candidates.free_share(position) * candidates.ramp_of(position) for position in (one, other)]
        return one if worth[0] >= worth[1] else other

    # ------------------------------------------------------------------ intents

    def _noted(self, scoped: Keys, now: float) -> Values:
        """Intents, fresh and lapsed, 0 where there is none: u32[n]."""
        if now - self._rotated_at >= 2 * INTENT_S:
            return np.zeros(len(scoped), dtype=np.uint32)
        values = self._intents.find(scoped)
        if self._older.live:
            values = np.where(values != 0, values, self._older.find(scoped)).astype(np.uint32)
        return values

    def _intent(self, low: int, high: int, slots: SlotMask, now: float) -> tuple[int, int]:
        """As :meth:`_noted` and :func:`_read`, for one block."""
        if now - self._rotated_at >= 2 * INTENT_S:
            return 0, 0
        value = self._intents.value(low, high) or (self._older.value(low, high) if self._older.live else 0)
        slot, age = (value >> _SLOT_SHIFT) - 1, _tick(now) - value & _TICK_MASK
        usable = value and age < INTENT_S * _TICKS_A_SECOND and slots.item(min(slot, len(slots) - 1))
        return 1 + code_of(slot, 0) if usable else 0, value >> _TICK_BITS & _WRITER_MASK

    def in_flight(self, keys: Keys, scope: Keys, slots: SlotMask, now: float) -> npt.NDArray[np.bool_]:
        """Blocks that a writer was sent to one of ``slots`` with, and that have not arrived: bool[n]."""
        if not self._intents.live and not self._older.live:
            return np.zeros(len(keys), dtype=np.bool_)
        if len(keys) <= FEW:
            few = [self._intent(low, high, slots, now)[0] != 0 for low, high in (keys ^ scope).tolist()]
            return np.array(few, dtype=np.bool_)
        standing: npt.NDArray[np.bool_] = _read(self._noted(keys ^ scope, now), slots, now)[0] != 0
        return standing

    def _rotate(self, now: float) -> None:
        if now - self._rotated_at >= INTENT_S or self._intents.live >= INTENTS_MAX:
            self._older = self._intents if now - self._rotated_at < 2 * INTENT_S else Table()
            self._intents = Table()
            self._rotated_at = now

    def fulfilled(self, keys: Keys, scope: Keys) -> None:
        """These blocks are held, and the directory says where, or they were refused: nobody is on the way any more."""
        scoped = keys ^ scope
        for table in (self._intents, self._older):
            if table.live:
                table.discard(scoped)

    @property
    def intents(self) -> int:
        """Intents remembered, fresh and lapsed."""
        return self._intents.live + self._older.live

    def check(self) -> None:
        self._intents.check()
        self._older.check()


def _in_turns(weights: Sequence[float], runs: int) -> list[int]:
    """``runs`` indexes into ``weights``, evenly spread, each by its weight (smooth weighted round robin)."""
    total = sum(weights)
    credit = [0.0] * len(weights)
    turns = []
    for _ in range(runs):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        best = credit.index(max(credit))
        credit[best] -= total
        turns.append(best)
    return turns


def _read(intents: Values, slots: SlotMask, now: float) -> tuple[Codes, Values]:
    """Location codes of those that are fresh and for nodes in ``slots``, u16[n], else 0; and whose they are."""
    writers: Values = (intents >> np.uint32(_TICK_BITS)) & np.uint32(_WRITER_MASK)
    age = (_tick(now) - (intents & np.uint32(_TICK_MASK)).astype(np.int64)) & _TICK_MASK
    slot = (intents >> np.uint32(_SLOT_SHIFT)).astype(np.int64) - 1
    usable = (intents != 0) & (age < INTENT_S * _TICKS_A_SECOND)
    usable &= slots.take(slot, mode="clip")
    return np.where(usable, 1 + 4 * slot, 0).astype(np.uint16), writers


def _intents_of(codes: Codes, now: float, writer: int) -> Values:
    """What to note of blocks that go there: u32[n]."""
    slots: Values = (codes.astype(np.uint32) - np.uint32(1)) >> np.uint32(2)
    noted: Values = ((slots + np.uint32(1)) << np.uint32(_SLOT_SHIFT)) | np.uint32(writer << _TICK_BITS | _tick(now))
    return noted


def _tick(now: float) -> int:
    return int(now * _TICKS_A_SECOND) & _TICK_MASK

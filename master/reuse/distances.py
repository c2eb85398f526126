"""Sampled reuse distances of one tenant's blocks: the hit rate that any size of cache would have had.

SHARDS (Waldspurger, Park, Garthwaite and Ahmad, FAST 2015), its fixed-size variant: a block is sampled when
the hash of its key lies below a threshold, which falls when there are too many samples; the bytes between
two uses of a sampled block, divided by the sampling rate, are its reuse distance. An LRU cache of at least
that many bytes would have had it. "SHARDS-adj" makes up for blocks sampled more or less than their share.

Chains follow the eviction of the nodes: all blocks of a call are used at one moment, the deeper is the
colder, and a block stays as long as one that follows it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

SAMPLES_MAX: Final = 8192
#: Samples of one call: what bounds the time that a long prompt takes.
CALL_SAMPLES_MAX: Final = 512
#: A threshold that must fall leaves this share of the samples, so that it falls seldom.
KEPT: Final = 7 / 8
#: Positions of the timeline, in samples: it is closed up when they have all been used.
TIMELINE: Final = 3
#: Histogram of distances: cells an octave, and octaves (up to a pebibyte).
CELLS: Final = 32
OCTAVES: Final = 50
#: Samples colder than this many times the largest size ever asked about need not be known.
HORIZON: Final = 8.0

_HASHES: Final = 2.0**64
_LAST: Final = (1 << 64) - 1


class _Found(NamedTuple):
    """Distinct sampled blocks of a call in chain order, arrays of one length.

    ``chain`` are indexes into what was looked for, ``at`` where each hash is or belongs among the samples,
    ``positions`` where those that are ``known`` stand in the timeline, else -1.
    """

    chain: Indexes
    hashes: Hashes
    at: Indexes
    known: Flags
    positions: Indexes

    def only(self, flags: Flags) -> _Found:
        return _Found(*(part[flags] for part in self))  # type: ignore[arg-type]


class ReuseDistances:
    """Bounded by ``SAMPLES_MAX`` samples, about 0.4 MB. Not thread-safe.

    Counts age: those of ``half_life_s`` ago count half. ``hashes`` are u64, well mixed, one a block.
    """

    def __init__(self, now: float, *, half_life_s: float = math.inf, samples_max: int = SAMPLES_MAX) -> None:
        self._samples_max = samples_max
        self._half_life_s = half_life_s
        self._aged_at = now
        self._threshold = _LAST
        self._horizon = math.inf
        # Sampled hashes in rising order, where each stands in the timeline, and its group; the timeline holds the bytes
        # of the sample last used at that position, 0 for a block that was asked for and never stored.
        self._hashes: Hashes = np.empty(0, dtype=np.uint64)
        self._positions: Indexes = np.empty(0, dtype=np.int64)
        self._groups: Indexes = np.empty(0, dtype=np.int64)
        self._timeline: Floats = np.zeros(TIMELINE * samples_max + CALL_SAMPLES_MAX)
        self._end = 0
        # Estimated references by reuse distance. All counts are in blocks, scaled to all blocks.
        self._reused: Floats = np.zeros(CELLS * OCTAVES)
        self._asked = 0.0
        self._estimated = 0.0
        self._unknowable = 0.0
        self.references = 0

    @property
    def samples(self) -> int:
        return len(self._hashes)

    @property
    def rate(self) -> float:
        """The share of blocks that is sampled."""
        return (self._threshold + 1) / _HASHES

    # ------------------------------------------------------------------ what happens

    def asked(self, hashes: Hashes, present: Flags, block_bytes: int, now: float, group: int = 0) -> None:
        """A lookup: a chain's blocks in order, and which of them the pool has. Each is a reference, and used.

        ``group``: a number that :meth:`forget` may be given."""
        self._age(now)
        self._asked += len(hashes)
        picked = self._pick(hashes)
        if not len(picked):
            return
        found = self._find(hashes[picked])
        there = present[picked[found.chain]]
        held = np.zeros(len(there))
        held[found.known] = self._timeline[found.positions[found.known]]
        self._count(self._distances(found, held), there)
        # What the pool has was stored, if before this began to look; what it has not must be stored first.
        held[(held == 0) & there] = block_bytes
        self._use(found, held, group)

    def stored(self, hashes: Hashes, block_bytes: int, now: float, group: int = 0) -> None:
        """Blocks of a chain, in order, are being stored: used, if they had not been asked for before."""
        self._age(now)
        picked = self._pick(hashes)
        if not len(picked):
            return
        found = self._find(hashes[picked])
        self._timeline[found.positions[found.known]] = block_bytes
        new = ~found.known
        if new.any():
            self._use(found.only(new), np.full(int(new.sum()), float(block_bytes)), group)

    def forget(self, group: int) -> None:
        """Its blocks are gone: they fill no cache any more, and the next use of each is a first one. What was counted
        so far stays."""
        self._keep(self._groups != group)

    # ------------------------------------------------------------------ what it says

    def predict(self, sizes: Sequence[int]) -> list[float]:
        """The hit rate of lookups, by block, of an LRU cache of each of these sizes in bytes; 0 without data."""
        if sizes:
            self._horizon = max(HORIZON * max(sizes), 0.0 if math.isinf(self._horizon) else self._horizon)
        asked = self._asked - self._unknowable
        if asked <= 0:
            return [0.0] * len(sizes)
        # Blocks sampled less than their share are taken to be those used most often, as these weigh most.
        adjusted = self._reused.copy()
        adjusted[0] += self._asked - self._estimated
        reached = np.concatenate(((0.0,), np.cumsum(adjusted)))
        at = [CELLS * math.log2(size) if size >= 1 else 0.0 for size in sizes]
        hits = np.interp(at, np.arange(len(reached)), reached)
        return [min(max(float(count) / asked, 0.0), 1.0) if size >= 1 else 0.0
                for count, size in zip(hits, sizes, strict=True)]  # fmt: skip

    # ------------------------------------------------------------------ inside

    def _age(self, now: float) -> None:
        """Let old counts fade; once in a hundredth of the half-life is enough."""
        elapsed = now - self._aged_at
        if elapsed < self._half_life_s / 100:
            return
        kept = 0.5 ** (elapsed / self._half_life_s)
        self._aged_at = now
        self._reused *= kept
        self._asked *= kept
        self._estimated *= kept
        self._unknowable *= kept

    def _pick(self, hashes: Hashes) -> Indexes:
        """Where the sampled ones are; lowers the threshold when they are too many for one call."""
        picked = np.flatnonzero(hashes <= np.uint64(self._threshold))
        if len(picked) > CALL_SAMPLES_MAX:
            below = np.partition(hashes[picked], CALL_SAMPLES_MAX)[CALL_SAMPLES_MAX]
            self._lower(int(below))
            picked = np.flatnonzero(hashes <= np.uint64(self._threshold))
        return picked

    def _find(self, hashes: Hashes) -> _Found:
        # Looked for in rising order, which is quicker, then put back into the order of the chain.
        order = np.argsort(hashes, kind="stable")
        rising = hashes[order]
        at = np.searchsorted(self._hashes, rising)
        known = np.zeros(len(at), dtype=np.bool_)
        positions = np.full(len(at), -1, dtype=np.int64)
        if len(self._hashes):
            np.equal(self._hashes.take(at, mode="clip"), rising, out=known)
            positions[known] = self._positions[at[known]]
        back = np.argsort(order)
        repeats = rising[1:] == rising[:-1]
        if repeats.any():
            first = np.concatenate(((True,), ~repeats))
            back = back[first[back]]
        return _Found(order[back], rising[back], at[back], known[back], positions[back])

    def _distances(self, found: _Found, held: Floats) -> Floats:
        """Reuse distances in bytes, inf for what was never stored. A block is held while one that follows it is."""
        distances = np.full(len(held), np.inf)
        stored = held > 0
        if stored.any():
            used_at = found.positions[stored]
            oldest = int(used_at.min())
            newer = self._timeline[oldest : self._end][::-1].cumsum()
            distances[stored] = newer[self._end - 1 - used_at] / self.rate
            distances = np.minimum.accumulate(distances[::-1])[::-1]
        return distances

    def _count(self, distances: Floats, present: Flags) -> None:
        weight = 1 / self.rate
        reused = np.isfinite(distances)
        self.references += len(distances)
        self._estimated += weight * len(distances)
        # The pool has blocks that were stored before this tenant was sampled: they say nothing.
        self._unknowable += weight * int((present & ~reused).sum())
        cells = (CELLS * np.log2(np.maximum(distances[reused], 1.0))).astype(np.int64)
        np.add.at(self._reused, np.minimum(cells, len(self._reused) - 1), weight)

    def _use(self, found: _Found, held: Floats, group: int) -> None:
        """Put blocks of one call at the end of the timeline, the deepest first."""
        count, known = len(held), found.known
        self._timeline[found.positions[known]] = 0
        if self._end + count > len(self._timeline):
            self._close_up()
        fresh = np.arange(self._end + count - 1, self._end - 1, -1)
        self._timeline[self._end : self._end + count] = held[::-1]
        self._end += count
        self._positions[found.at[known]] = fresh[known]
        if known.all():
            return
        new = ~known
        order = np.argsort(found.hashes[new])
        at = found.at[new][order]
        self._hashes = np.insert(self._hashes, at, found.hashes[new][order])
        self._positions = np.insert(self._positions, at, fresh[new][order])
        self._groups = np.insert(self._groups, at, group)
        if len(self._hashes) > self._samples_max:
            self._forget_cold()
        if len(self._hashes) > self._samples_max:
            self._lower(int(self._hashes[int(KEPT * self._samples_max)]))

    def _close_up(self) -> None:
        order = np.argsort(self._positions)
        held = self._timeline[self._positions[order]]
        self._timeline[:] = 0
        self._timeline[: len(held)] = held
        self._positions[order] = np.arange(len(held))
        self._end = len(held)

    def _forget_cold(self) -> None:
        """Forget samples so cold that no size anyone asks about would hold them."""
        if math.isinf(self._horizon):
            return
        newer = self._timeline[: self._end][::-1].cumsum()[::-1]
        self._keep(newer[self._positions] <= self._horizon * self.rate)

    def _lower(self, above: int) -> None:
        """Sample only what hashes below ``above``."""
        self._threshold = max(above - 1, 0)
        self._keep(self._hashes <= np.uint64(self._threshold))

    def _keep(self, kept: Flags) -> None:
        self._timeline[self._positions[~kept]] = 0
        self._hashes = self._hashes[kept]
        self._positions = self._positions[kept]
        self._groups = self._groups[kept]

    def check(self) -> None:
        """Assert that samples, positions and bytes agree."""
        assert len(self._hashes) == len(self._positions) == len(self._groups) <= self._samples_max
        assert (np.diff(self._hashes.astype(np.float64)) >= 0).all() and len(np.unique(self._hashes)) == self.samples
        assert not self.samples or int(self._hashes[-1]) <= self._threshold
        assert len(np.unique(self._positions)) == self.samples, "two samples stand at one position"
        assert not self.samples or 0 <= int(self._positions.min()) <= int(self._positions.max()) < self._end
        unused = np.ones(len(self._timeline), dtype=np.bool_)
        unused[self._positions] = False
        assert not self._timeline[unused].any(), "bytes of no sample"
        assert (self._timeline >= 0).all() and (self._reused >= 0).all()
        assert self._unknowable <= self._estimated * (1 + 1e-9)

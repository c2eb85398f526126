"""Counters of the master's own work. Blocks asked = hits by tier + misses by reason."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Histogram

from kvstrata.master.content.lookups import LookedUp
from kvstrata.master.content.misses import COUNTED
from kvstrata.master.directory.directory import Found
from kvstrata.master.directory.probing import FEW
from kvstrata.proto.status import PlaceState, Tier
from kvstrata.transfer.timings import exemplar_of
from kvstrata.transfer.tracing import TRACING

_LATENCY_BUCKETS: Final = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5)


class Metrics:
    """Own registry, so that two masters in one process (tests) do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lookups = Counter("kvstrata_master_lookups", "Lookups answered", registry=self.registry)
        self._asked = Counter("kvstrata_master_blocks_asked", "Blocks asked for in lookups", registry=self.registry)
        hits = Counter("kvstrata_master_block_hits", "Blocks found, by tier", ["tier"], registry=self.registry)
        misses = Counter(
            "kvstrata_master_block_misses", "Blocks not found, by reason", ["reason"], registry=self.registry
        )
        places = Counter(
            "kvstrata_master_blocks_placed",
            "Blocks placed, by answer; unasked: to a sole node",
            ["state"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kvstrata_master_lookup_seconds",
            "Time in a lookup, its wait for the lock included",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._hits = [hits.labels(tier.name.lower()) for tier in Tier]
        self._misses: dict[int, Counter] = {reason: misses.labels(reason.label) for reason in COUNTED}
        self._places = [places.labels(state.name.lower()) for state in PlaceState]
        self._unasked = places.labels("unasked")

    def looked_up(self, answer: LookedUp, seconds: float, request: str = "") -> None:
        """Count one lookup; by its trace, or else by ``request``, a person finds one that took so long."""
        found = answer.found
        asked = len(found.codes)
        self._lookups.inc()
        self._asked.inc(asked)
        self._seconds.observe(seconds, exemplar_of(TRACING.trace_id() if TRACING.on else "", request))
        for counter, count in zip(self._hits, _tiers(found, len(self._hits)), strict=False):
            if count:
                counter.inc(count)
        if len(answer.reasons):
            for reason, count in _reasons(answer):
                self._misses[reason].inc(count)

    def counted(self) -> dict[str, int]:
        """Of lookups since the start, for what is shown: blocks ``asked`` are the sum of ``hit`` and ``miss`` ones."""
        numbers = {"lookups": _value(self._lookups), "asked": _value(self._asked)}
        numbers.update({f"hit {tier.name.lower()}": _value(self._hits[tier]) for tier in Tier})
        numbers.update({f"miss {reason.label}": _value(self._misses[reason]) for reason in COUNTED})
        return numbers

    def placed(self, states: npt.NDArray[np.uint8]) -> None:
        """Count one placement: ``states`` are the blocks' :class:`PlaceState`."""
        for counter, count in zip(self._places, _counts(states, len(self._places)), strict=True):
            if count:
                counter.inc(count)

    def went(self, blocks: int) -> None:
        """Count blocks that went to a pool's one node without a question."""
        self._unasked.inc(blocks)


def _tiers(found: Found, size: int) -> list[int]:
    """Blocks that are there, by tier. A code is 1 + 4 * slot + tier."""
    if len(found.codes) > FEW:
        return _counts((found.codes[found.present] - np.uint16(1)) & np.uint16(3), size)
    blocks = zip(found.codes.tolist(), found.present.tolist(), strict=True)
    tiers = [code - 1 & 3 for code, present in blocks if present]
    return [tiers.count(tier) for tier in range(size)]


def _reasons(answer: LookedUp) -> list[tuple[int, int]]:
    """(reason, blocks) of those that are not there."""
    if len(answer.reasons) <= FEW:
        packed = answer.reasons.tobytes()
        return [(reason, packed.count(reason)) for reason in set(packed)]
    counts = answer.misses()
    return [(reason, int(counts[reason])) for reason in np.flatnonzero(counts).tolist()]


def _counts(numbers: npt.NDArray[np.unsignedinteger], size: int) -> list[int]:
    """How often each number below ``size`` occurs."""
    if len(numbers) <= FEW:
        few = numbers.tolist()
        return [few.count(number) for number in range(size)]
    counts: list[int] = np.bincount(numbers, minlength=size).tolist()
    return counts


def _value(counter: Counter) -> int:
    return int(next(sample.value for family in counter.collect() for sample in family.samples))

"""The result of a replay: the cases side by side, what the real processes measured, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.coordinator import Measured
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.messages import Outcome
from kvstrata.cli.replay.options import ReplayOptions
from kvstrata.cli.replay.schedule import Schedule
from kvstrata.cli.replay.simulator import Hits, infinite_cache, no_cache, pooled, private_caches
from kvstrata.cli.replay.timing import Latencies, latencies
from kvstrata.storage.eviction.setting import EvictionOrder

#: The replay must hit what its simulator hits, within this many points of token hit rate; see ``_off``.
ORACLE_POINTS_MAX = 0.5
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to serve the trace: what it hits, and how long its requests take by the cost model."""

    name: str
    hits: Hits
    latencies: Latencies


@dataclass(frozen=True, slots=True)
class Cases:
    """All of them, on one schedule. ``pool`` is measured, ``oracle`` is the simulator of the same policy."""

    none: Case
    private: Case
    pool: Case
    oracle: Case
    ceiling: Case

    def all(self) -> tuple[Case, ...]:
        return (self.none, self.private, self.pool, self.oracle, self.ceiling)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the engine processes measured in all. Seconds are real ones; GB are 1e9 bytes."""

    seconds: float
    loaded_bytes: int
    stored_bytes: int
    load_s: float
    store_s: float
    wrong_bytes: int
    failed_requests: int
    unsettled: int
    reasons: dict[str, int]
    tiers: dict[str, int]  #: blocks loaded, by where they were

    @property
    def load_gb_s(self) -> float:
        """While loading; 0 when nothing was loaded."""
        return self.loaded_bytes / self.load_s / 1e9 if self.load_s else 0.0

    @property
    def store_gb_s(self) -> float:
        return self.stored_bytes / self.store_s / 1e9 if self.store_s else 0.0

    @classmethod
    def of(cls, measured: Measured) -> Traffic:
        reasons: Counter[str] = Counter()
        tiers: Counter[str] = Counter()
        for outcome in measured.outcomes:
            reasons.update(outcome.reasons)
            tiers.update(outcome.tiers)
        done = measured.outcomes
        return cls(
            seconds=measured.seconds,
            loaded_bytes=sum(outcome.loaded_bytes for outcome in done),
            stored_bytes=sum(outcome.stored_bytes for outcome in done),
            load_s=sum(outcome.load_s for outcome in done),
            store_s=sum(outcome.store_s for outcome in done),
            wrong_bytes=sum(outcome.wrong_bytes for outcome in done),
            failed_requests=sum(bool(outcome.error) for outcome in done),
            unsettled=sum(outcome.unsettled for outcome in done),
            reasons=dict(reasons.most_common()),
            tiers=dict(sorted(tiers.items())),
        )


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Everything a report needs. ``pool_calls_s`` float64 [turns] is measured lookup + load.

    ``faults`` are processes that were lost or restarted on the way. Only they excuse a gap to the simulator: a
    client's "node lost" with all processes alive is a defect.
    """

    options: ReplayOptions
    costs: CostModel
    schedule: Schedule
    pool_blocks: int
    cases: Cases
    traffic: Traffic
    pool_calls_s: Floats
    faults: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def oracle_points(self) -> float:
        """Replay minus oracle, in points of token hit rate."""
        return 100 * (self.cases.pool.hits.rate() - self.cases.oracle.hits.rate())

    @property
    def ceiling_points(self) -> float:
        """Replay minus the infinite cache's rate, in points."""
        return 100 * (self.cases.pool.hits.rate() - self.cases.ceiling.hits.rate())

    @property
    def measured_ttft_s(self) -> Floats:
        """Float64 [turns]: modelled queue and prefill, with the measured lookup and load between them."""
        modelled = self.cases.pool.latencies
        total: Floats = modelled.queue_s + self.pool_calls_s + modelled.prefill_s
        return total

    def problems(self) -> list[str]:
        """Why the run is not a pass; empty when it is."""
        found = []
        if self.traffic.wrong_bytes:
            found.append(f"{self.traffic.wrong_bytes} wrong bytes")
        if self.traffic.failed_requests:
            found.append(f"{self.traffic.failed_requests} failed requests, the first: {self.errors[0]}")
        if self._off() and not self.faults:
            found.append(
                f"the replay is {self.oracle_points:+.2f} points from its simulator: more than {ORACLE_POINTS_MAX}"
            )
        return found

    def _off(self) -> bool:
        """The simulator is plain LRU: another order may hit more than it, never less."""
        exact = self.options.eviction is EvictionOrder.LRU and self.options.masters is None
        return self.oracle_points < -ORACLE_POINTS_MAX or (exact and self.oracle_points > ORACLE_POINTS_MAX)

    @property
    def exit_code(self) -> int:
        return 1 if self.problems() else 0

    def table(self) -> str:
        """The cases side by side and what was measured, as text for a terminal."""
        from kvstrata.cli.replay.report import text_report

        return text_report(self)

    def to_json(self) -> dict[str, object]:
        """The same as plain data for ``json.dumps``."""
        from kvstrata.cli.replay.report import json_report

        return json_report(self)

    def html(self) -> str:
        """The same as a self-contained page with plots."""
        from kvstrata.cli.replay.page import html_report

        return html_report(self)


def measured_hits(schedule: Schedule, outcomes: Sequence[Outcome]) -> Hits:
    """What the engines reported, in tokens; a failed request hit nothing."""
    turns = len(schedule.turns)
    return Hits(
        tokens_in=np.fromiter((turn.tokens_in for turn in schedule.turns), np.int64, turns),
        private=np.fromiter((outcome.private_blocks for outcome in outcomes), np.int64, turns) * schedule.block_tokens,
        pool=np.fromiter((outcome.pool_blocks for outcome in outcomes), np.int64, turns) * schedule.block_tokens,
    )


def assemble(
    options: ReplayOptions,
    costs: CostModel,
    schedule: Schedule,
    pool_blocks: int,
    measured: Measured,
    losses: Sequence[str],
) -> ReplayResult:
    """Simulate the other cases and put all side by side. ``losses`` are processes that the pool lost."""

    def case(name: str, hits: Hits) -> Case:
        return Case(name, hits, latencies(schedule, hits, costs))

    traffic = Traffic.of(measured)
    private_blocks = options.private_blocks
    private = private_caches(schedule, options.engines, private_blocks)
    return ReplayResult(
        options=options,
        costs=costs,
        schedule=schedule,
        pool_blocks=pool_blocks,
        cases=Cases(
            none=case("no cache", no_cache(schedule)),
            private=case("private only", private),
            pool=case("pool (measured)", measured_hits(schedule, measured.outcomes)),
            oracle=case("pool (simulator)", pooled(schedule, options.engines, private_blocks, pool_blocks)),
            ceiling=case("infinite pool", infinite_cache(schedule, private)),
        ),
        traffic=traffic,
        pool_calls_s=np.array([outcome.lookup_s + outcome.load_s for outcome in measured.outcomes], dtype=np.float64),
        faults=(*losses, *measured.engines_lost),
        errors=tuple(outcome.error for outcome in measured.outcomes if outcome.error),
    )

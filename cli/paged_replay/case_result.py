"""One case in numbers, and what one case gains over another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.cli.paged_replay.case import CaseRun, Outcome
from kvstrata.cli.paged_replay.options import CaseName
from kvstrata.cli.paged_replay.plan import Plan
from kvstrata.cli.paged_replay.simulator import Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case as arrays, one entry a turn, and totals. Seconds are real ones; failed turns count as nothing hit."""

    run: CaseRun
    prompt_tokens: Ints
    local_tokens: Ints
    external_tokens: Ints
    ttft_s: Floats
    total_s: Floats

    @classmethod
    def of(cls, run: CaseRun, plan: Plan) -> CaseResult:
        served = [outcome for outcome in run.outcomes if not outcome.error]
        return cls(
            run=run,
            prompt_tokens=np.array([len(turn.tokens) for turn in plan.turns], dtype=np.int64),
            local_tokens=np.array([outcome.local_tokens for outcome in run.outcomes], dtype=np.int64),
            external_tokens=np.array([outcome.external_tokens for outcome in run.outcomes], dtype=np.int64),
            ttft_s=np.array([outcome.ttft_s for outcome in served], dtype=np.float64),
            total_s=np.array([outcome.total_s for outcome in served], dtype=np.float64),
        )

    @property
    def name(self) -> CaseName:
        return self.run.name

    @property
    def computed_tokens(self) -> Ints:
        computed: Ints = self.prompt_tokens - self.local_tokens - self.external_tokens
        return computed

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        return 1 - int(self.computed_tokens.sum()) / int(self.prompt_tokens.sum())

    @property
    def output_tokens(self) -> int:
        return sum(len(outcome.output) for outcome in self.run.outcomes)

    @property
    def requests_a_second(self) -> float:
        return len(self.ttft_s) / self.run.seconds

    @property
    def tokens_a_second(self) -> float:
        """Prompt and output tokens served."""
        served = sum(outcome.prompt_tokens for outcome in self.run.outcomes if not outcome.error)
        return (served + self.output_tokens) / self.run.seconds

    def breakdown_s(self) -> dict[str, float]:
        """Mean seconds of TTFT a served request: adds up to the mean TTFT.

        ``queue``: in the engine, behind other requests' steps; ``lookup``: for the pool's answer; ``load``;
        ``compute``: in steps that worked for it; ``other``: pipes, and a processor to run on.
        """
        served = [outcome for outcome in self.run.outcomes if not outcome.error]

        def mean(seconds: Callable[[Outcome], float]) -> float:
            return float(np.mean([seconds(outcome) for outcome in served])) if served else 0.0

        lookup_s, load_s = mean(lambda o: o.lookup_s), mean(lambda o: o.load_s)
        compute_s, engine_s = mean(lambda o: o.compute_s), mean(lambda o: o.engine_s)
        return {
            "queue": engine_s - lookup_s - load_s - compute_s,
            "lookup": lookup_s,
            "load": load_s,
            "compute": compute_s,
            "other": mean(lambda o: o.ttft_s) - engine_s,
        }


@dataclass(frozen=True, slots=True)
class Gain:
    """Private caches against the pool: means divided, medians divided, and the median of what each request won.

    A median divided by a median compares different requests; ``each_...`` compares each request with itself.
    """

    computed_mean: float
    computed_p50: float
    ttft_mean: float
    ttft_p50: float
    computed_each: float
    ttft_each: float

    @classmethod
    def of(cls, private: CaseResult, pool: CaseResult) -> Gain:
        return cls(
            computed_mean=_ratio(private.computed_tokens, pool.computed_tokens, np.mean),
            computed_p50=_ratio(private.computed_tokens, pool.computed_tokens, np.median),
            ttft_mean=_ratio(private.ttft_s, pool.ttft_s, np.mean),
            ttft_p50=_ratio(private.ttft_s, pool.ttft_s, np.median),
            computed_each=_each(private.computed_tokens, pool.computed_tokens),
            ttft_each=_each(private.ttft_s, pool.ttft_s),
        )

    @property
    def reached_mean(self) -> float:
        """How much of what fewer computed tokens could win shows in TTFT."""
        return self.ttft_mean / self.computed_mean if self.computed_mean else 0.0

    @property
    def reached_p50(self) -> float:
        return self.ttft_p50 / self.computed_p50 if self.computed_p50 else 0.0

    @property
    def reached_each(self) -> float:
        return self.ttft_each / self.computed_each if self.computed_each else 0.0


def _ratio(above: npt.NDArray[np.generic], below: npt.NDArray[np.generic], of: Callable[..., np.floating]) -> float:
    if not len(above) or not len(below) or not float(of(below)):
        return 0.0
    return float(of(above)) / float(of(below))


def _each(above: npt.NDArray[np.generic], below: npt.NDArray[np.generic]) -> float:
    """Median of the ratios, request by request; 0 when requests are missing on one side."""
    if len(above) != len(below) or not len(below):
        return 0.0
    return float(np.median(above.astype(np.float64) / below.astype(np.float64)))

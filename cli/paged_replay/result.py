"""The result of a replay on paged engines: the cases side by side, what the pool could win, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.cli.paged_replay.case import CaseRun
from kvstrata.cli.paged_replay.case_result import CaseResult, Gain
from kvstrata.cli.paged_replay.options import CaseName, PagedOptions
from kvstrata.cli.paged_replay.plan import Plan
from kvstrata.cli.paged_replay.simulator import Ints, cache_each, one_cache


@dataclass(frozen=True, slots=True)
class PagedResult:
    """Everything a report needs. ``ceiling`` and ``private_ceiling``: tokens hit with caches of infinite size."""

    options: PagedOptions
    plan: Plan
    cases: tuple[CaseResult, ...]
    ceiling: Ints
    private_ceiling: Ints

    @classmethod
    def of(cls, options: PagedOptions, plan: Plan, runs: Sequence[CaseRun]) -> PagedResult:
        aligned = runs[0].ready.aligned_tokens
        return cls(
            options=options,
            plan=plan,
            cases=tuple(CaseResult.of(run, plan) for run in runs),
            ceiling=one_cache(plan.turns, aligned),
            private_ceiling=cache_each(plan.turns, aligned),
        )

    def case(self, name: CaseName) -> CaseResult | None:
        return next((case for case in self.cases if case.name == name), None)

    @property
    def ceiling_rate(self) -> float:
        return int(self.ceiling.sum()) / self.plan.prompt_tokens

    @property
    def private_ceiling_rate(self) -> float:
        return int(self.private_ceiling.sum()) / self.plan.prompt_tokens

    @property
    def gain(self) -> Gain | None:
        private, pool = self.case("private"), self.case("pool")
        return Gain.of(private, pool) if private is not None and pool is not None else None

    def differences(self) -> list[str]:
        """Requests whose greedy tokens are not the same in all cases that served them, each by its first one."""
        found = []
        for turn in self.plan.turns:
            outputs = {case.name: case.run.outcomes[turn.index] for case in self.cases}
            served = [(name, outcome.output) for name, outcome in outputs.items() if not outcome.error]
            for name, output in served[1:]:
                if output != served[0][1]:
                    found.append(_difference(turn.index, served[0], (name, output)))
                    break
        return found

    def problems(self) -> list[str]:
        """Why the run is not a pass; empty when it is."""
        found = []
        differences = self.differences()
        if differences:
            found.append(f"{len(differences)} requests have other tokens, the first: {differences[0]}")
        for case in self.cases:
            failed = [outcome for outcome in case.run.outcomes if outcome.error]
            if failed:
                found.append(f"{case.name}: {len(failed)} failed requests, the first: {failed[0].error}")
            short = [
                turn.index
                for turn in self.plan.turns
                if not (outcome := case.run.outcomes[turn.index]).error
                and (len(outcome.output), outcome.prompt_tokens) != (turn.output_tokens, len(turn.tokens))
            ]
            if short:
                found.append(f"{case.name}: {len(short)} requests are not whole, the first: {short[0]}")
        return found

    @property
    def exit_code(self) -> int:
        return 1 if self.problems() else 0

    def table(self) -> str:
        """The cases side by side and what was measured, as text for a terminal."""
        from kvstrata.cli.paged_replay.report import text_report

        return text_report(self)

    def to_json(self) -> dict[str, object]:
        """The same as plain data for ``json.dumps``."""
        from kvstrata.cli.paged_replay.json_report import json_report

        return json_report(self)

    def html(self) -> str:
        """The same as a self-contained page with plots."""
        from kvstrata.cli.paged_replay.page import html_report

        return html_report(self)


def _difference(index: int, one: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> str:
    pairs = list(zip(one[1], other[1], strict=False))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return f"request {index} differs at token {place}: {one[0]} {one[1][place:][:4]}, {other[0]} {other[1][place:][:4]}"

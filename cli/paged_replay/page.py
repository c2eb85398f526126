"""A paged replay's result as an HTML page with plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstrata.cli.paged_replay.report import VERDICT, columns, notes, rows, title
from kvstrata.cli.paged_replay.result import PagedResult
from kvstrata.cli.replay.page import Page
from kvstrata.cli.replay.plots import COLOURS, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def html_report(result: PagedResult) -> str:
    """The page as text."""
    return Page(
        heading=f"kvstrata replay: {result.plan.trace_name}",
        title=title(result),
        verdict=VERDICT,
        problems=result.problems(),
        columns=columns(result),
        rows=rows(result),
        notes=notes(result),
        figures=drawn(
            [
                ("Time to first token by prompt length", lambda axes: _by_length(axes, result)),
                ("Distribution of time to first token", lambda axes: _distribution(axes, result)),
                ("Tokens computed, request by request", lambda axes: _computed(axes, result)),
            ]
        ),
    ).html()


def _by_length(axes: Axes, result: PagedResult) -> None:
    for case in result.cases:
        served = [outcome for outcome in case.run.outcomes if not outcome.error]
        lengths, ttft_s = [o.prompt_tokens for o in served], [o.ttft_s for o in served]
        axes.plot(lengths, ttft_s, ".", color=COLOURS[case.name], label=case.name, alpha=0.7)
    axes.set(xlabel="prompt tokens", ylabel="seconds", yscale="log")


def _distribution(axes: Axes, result: PagedResult) -> None:
    for case in result.cases:
        ordered = np.sort(case.ttft_s)
        axes.plot(
            ordered, 100 * np.arange(1, len(ordered) + 1) / len(ordered), color=COLOURS[case.name], label=case.name
        )
    axes.set(xlabel="seconds", ylabel="% of requests", xscale="log", ylim=(-2, 102))


def _computed(axes: Axes, result: PagedResult) -> None:
    for case in result.cases:
        axes.plot(np.cumsum(case.computed_tokens), color=COLOURS[case.name], label=case.name)
    needed = np.array([len(turn.tokens) for turn in result.plan.turns]) - result.ceiling
    axes.plot(np.cumsum(needed), "--", color=COLOURS["ceiling"], label="ceiling")
    axes.set(xlabel="requests, session after session", ylabel="tokens so far")

"""The plots of a report: hit rate over time, TTFT over time, TTFT distribution; inline SVG.

Text and axes are drawn in ``currentColor``, so that a plot is readable on a light and on a dark page.
matplotlib is imported where it is needed: a replay without a page does not need it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.result import Case, Floats, ReplayResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Plot = Callable[[Axes], None]

WINDOWS = 60
#: One colour a case, apart for colour-blind eyes too (Okabe and Ito), readable on white and on near black.
COLOURS = {"none": "#999999", "private": "#E69F00", "pool": "#0099DD", "ceiling": "#009E73"}

# A colour that nothing else has, to be found again in the SVG.
_INK = "#010203"
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


def svg_plots(result: ReplayResult) -> list[tuple[str, str]]:
    """(caption, SVG) of each plot; empty when matplotlib is not installed."""
    return drawn(
        [
            ("Token hit rate over virtual time", lambda axes: _hit_rate(axes, result)),
            ("Median time to first token over virtual time (modelled)", lambda axes: _ttft(axes, result)),
            ("Distribution of time to first token (modelled)", lambda axes: _distribution(axes, result)),
        ]
    )


def drawn(plots: Sequence[tuple[str, Plot]]) -> list[tuple[str, str]]:
    """(caption, SVG) of (caption, what draws it on axes); empty when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    style: dict[str, Any] = dict.fromkeys(_INKED, _INK)
    style |= {"svg.fonttype": "none", "svg.hashsalt": "kvstrata", "font.size": 10}
    with matplotlib.rc_context(style):  # type: ignore[arg-type]  # The stubs want literal keys.
        return [(caption, _svg(plot)) for caption, plot in plots]


def _svg(plot: Plot) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.grid(alpha=0.25)
    plot(axes)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def _shown(result: ReplayResult) -> list[tuple[str, Case]]:
    return [(key, getattr(result.cases, key)) for key in COLOURS]


def _line(key: str, case: Case) -> dict[str, Any]:
    """The ceiling is dashed: the pool often lies right under it."""
    return {"color": COLOURS[key], "label": case.name, "linestyle": "--" if key == "ceiling" else "-"}


def _hit_rate(axes: Axes, result: ReplayResult) -> None:
    hours, window = _windows(result)
    for key, case in _shown(result):
        hit = np.bincount(window, case.hits.private + case.hits.pool, WINDOWS)
        asked = np.bincount(window, case.hits.tokens_in, WINDOWS)
        some = asked > 0
        axes.plot(hours[some], 100 * hit[some] / asked[some], **_line(key, case))
    axes.set(xlabel="hours", ylabel="% of prompt tokens", ylim=(-2, 102))


def _ttft(axes: Axes, result: ReplayResult) -> None:
    hours, window = _windows(result)
    for key, case in _shown(result):
        some, medians = _medians(window, case.latencies.ttft_s)
        axes.plot(hours[some], medians, **_line(key, case))
    axes.set(xlabel="hours", ylabel="seconds", yscale="log")


def _distribution(axes: Axes, result: ReplayResult) -> None:
    for key, case in _shown(result):
        ordered = np.sort(case.latencies.ttft_s)
        # At most a few hundred points: the page must stay small.
        picked = np.unique(np.linspace(0, len(ordered) - 1, 300).astype(int))
        axes.plot(ordered[picked], 100 * (picked + 1) / len(ordered), **_line(key, case))
    axes.set(xlabel="seconds", ylabel="% of requests", xscale="log", ylim=(-2, 102))


def _windows(result: ReplayResult) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Middle of each window in hours, and the window of each turn, by the schedule's arrival times."""
    at_s = np.array([turn.at_s for turn in result.schedule.turns])
    edges = np.linspace(0, max(float(at_s.max()), 1.0), WINDOWS + 1)
    window = np.clip(np.searchsorted(edges, at_s, side="right") - 1, 0, WINDOWS - 1)
    middles: Floats = (edges[:-1] + edges[1:]) / 2 / 3600
    return middles, window.astype(np.int64)


def _medians(window: npt.NDArray[np.int64], values: Floats) -> tuple[npt.NDArray[np.int64], list[float]]:
    """The windows that have turns, and the median of ``values`` in each."""
    some = np.unique(window)
    return some, [float(np.median(values[window == number])) for number in some]

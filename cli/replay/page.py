"""A result as one self-contained HTML page: no script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvstrata.cli.replay.plots import svg_plots
from kvstrata.cli.replay.report import notes, rows, title
from kvstrata.cli.replay.result import ReplayResult

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d0d7de; --good: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --line: #30363d; --good: #3fb950; --bad: #ff7b72; }
}
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 64rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: pre; }
figure { margin: 2rem 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
.verdict { font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); }
"""


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows: ``rows`` are (label, a cell for each column), ``figures`` (caption, SVG)."""

    heading: str
    title: str
    verdict: str
    problems: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    notes: Sequence[str]
    figures: Sequence[tuple[str, str]]

    def html(self) -> str:
        """The page as text."""
        head = "".join(f"<th scope='col'>{escape(column)}</th>" for column in self.columns)
        body = "".join(
            f"<tr><td>{escape(label)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
            for label, cells in self.rows
        )
        items = "".join(f"<li>{escape(line)}</li>" for line in self.notes)
        return (
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
            "<meta name='viewport' content='width=device-width, initial-scale=1'>"
            f"<title>{escape(self.heading)}</title><style>{_STYLE}</style></head><body>"
            f"<h1>{escape(self.heading)}</h1><p>{escape(self.title)}</p>{self._verdict()}"
            f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"{self._figures()}<h2>Measured</h2><ul>{items}</ul></body></html>\n"
        )

    def _verdict(self) -> str:
        if self.problems:
            return f"<p class='verdict bad'>Failed: {escape('; '.join(self.problems))}</p>"
        return f"<p class='verdict good'>Passed: {escape(self.verdict)}</p>"

    def _figures(self) -> str:
        if not self.figures:
            return "<p>Install <code>kvstrata[report]</code> (matplotlib) to see plots here.</p>"
        return "".join(f"<figure><figcaption>{escape(text)}</figcaption>{svg}</figure>" for text, svg in self.figures)


def html_report(result: ReplayResult) -> str:
    """The page of a replay on engine stand-ins."""
    return Page(
        heading=f"kvstrata replay: {result.schedule.trace_name}",
        title=title(result),
        verdict="no wrong byte, no failed request.",
        problems=result.problems(),
        columns=[case.name for case in result.cases.all()],
        rows=rows(result),
        notes=notes(result),
        figures=svg_plots(result),
    ).html()

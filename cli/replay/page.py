"""A replay's result as one self-contained HTML page: no script, no network, light and dark."""

from __future__ import annotations

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


def html_report(result: ReplayResult) -> str:
    """The page as text."""
    head = "".join(f"<th scope='col'>{escape(case.name)}</th>" for case in result.cases.all())
    body = "".join(
        f"<tr><td>{escape(label)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for label, cells in rows(result)
    )
    items = "".join(f"<li>{escape(line)}</li>" for line in notes(result))
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>kvstrata replay: {escape(result.schedule.trace_name)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>kvstrata replay</h1><p>{escape(title(result))}</p>{_verdict(result)}"
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"{_figures(result)}<h2>Measured</h2><ul>{items}</ul></body></html>\n"
    )


def _verdict(result: ReplayResult) -> str:
    problems = result.problems()
    if problems:
        return f"<p class='verdict bad'>Failed: {escape('; '.join(problems))}</p>"
    return "<p class='verdict good'>Passed: no wrong byte, no failed request.</p>"


def _figures(result: ReplayResult) -> str:
    figures = [f"<figure><figcaption>{escape(text)}</figcaption>{svg}</figure>" for text, svg in svg_plots(result)]
    if not figures:
        return "<p>Install <code>kvstrata[report]</code> (matplotlib) to see plots here.</p>"
    return "".join(figures)

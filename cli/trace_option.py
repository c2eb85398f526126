"""``--traces`` and ``--traces-ratio``, alike on every daemon."""

from __future__ import annotations

from typing import Annotated

import typer

_PANEL = "Traces"

Traces = Annotated[
    str,
    typer.Option(
        help="Address of an OpenTelemetry collector (OTLP over HTTP), as http://127.0.0.1:4318, or off; by default "
        "what OTEL_EXPORTER_OTLP_ENDPOINT says.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TracesRatio = Annotated[
    float,
    typer.Option(
        help="Of calls that come without a trace, the share that begins one, 0 to 1.",
        min=0,
        max=1,
        rich_help_panel=_PANEL,
    ),
]

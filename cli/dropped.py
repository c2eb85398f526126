"""How commands end that took something out of the pool: what went, and who has not confirmed yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from kvstrata.cli.as_json import as_dict
from kvstrata.cli.output import Exit, print_json, say
from kvstrata.proto import control_pb2 as control

Wait = Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="How long to wait for nodes.")]
Erase = Annotated[bool, typer.Option("--erase", help="Overwrite it on SSD before confirming.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Count what would go; change nothing.")]

WAIT_S = 5.0


def say_dropped(dropped: control.Dropped, what: str, *, dry_run: bool, as_json: bool) -> None:
    """Print what went; ends with 1 when a node has not confirmed."""
    if as_json:
        print_json(as_dict(dropped))
    else:
        say(f"{dropped.blocks} blocks {'would go' if dry_run else 'are gone'}: {what}")
    end_of(dropped.unreached)


def end_of(unreached: Sequence[str]) -> None:
    """Says who has not confirmed, and ends with 1 then: a script must not take it for done."""
    if unreached:
        nodes = ", ".join(unreached)
        say(f"not confirmed yet by {nodes}: the master goes on telling them, and lookups find nothing", err=True)
        raise typer.Exit(int(Exit.FAILED))

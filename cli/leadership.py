"""``kvstrata masters``: which masters there are, and which of them leads."""

from __future__ import annotations

import typer

from kvstrata.cli.as_json import as_dict
from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask
from kvstrata.cli.output import Exit, expected_errors, print_json, print_table, say


def masters(master: Master = DEFAULT_MASTER, as_json: Json = False) -> None:
    """Every master of the pool, and who leads. Exits 1 when nobody does, 3 when nobody answers."""
    with expected_errors():
        with ask(master) as admin:
            listed = admin.masters()
        led = any(row.leading for row in listed.masters)
        if as_json:
            print_json(as_dict(listed))
        else:
            if listed.problem:
                say(f"  problem: {listed.problem}")
            table = [
                (
                    row.channel,
                    f"leads, epoch {row.epoch}" if row.leading else "follows",
                    row.grpc or "-",
                    row.http or "-",
                    "answered" if row.self else "",
                )
                for row in listed.masters
            ]
            print_table("masters", ("channel", "role", "grpc", "http", ""), table)
            if not led:
                say("nobody leads: until one does, policies cannot be changed, and nothing is balanced")
        raise typer.Exit(Exit.OK if led else Exit.FAILED)

"""Asking before something is gone: on a terminal a question, in a script ``--yes``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvstrata.cli.output import Exit
from kvstrata.proto.errors import InvalidArgument

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(what: str, *, yes: bool) -> None:
    """Returns when ``what`` may be done. Raises :class:`InvalidArgument` where nobody can be asked; a "no" ends
    the command with 1."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument(f"{what}: there is no terminal to ask on; add --yes if that is what you want")
    if not typer.confirm(f"{what}. Go on?"):
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(int(Exit.FAILED))

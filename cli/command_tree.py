"""All commands as a flat list, for what goes through them: the reference, and tests of what each must have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from kvstrata.cli.app import app


def leaves(*, hidden: bool = False) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its path, groups' members after each other. ``hidden``: also those that no help shows."""
    yield from _below((), typer.main.get_command(app), hidden)


def _below(path: tuple[str, ...], command: Any, hidden: bool) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, below in command.commands.items():
        if hidden or not below.hidden:
            yield from _below((*path, name), below, hidden)

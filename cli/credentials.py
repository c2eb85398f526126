"""``--token-file``, ``--ca``, ``--cert``, ``--key``: taken by every command that calls a pool, written down once.

They are the environment's variables for this process and for those that it starts, so that whatever opens a client
finds them there. They name files: a secret is never an argument.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from kvstrata.client.security import credentials

_PANEL: Final = "Security"
#: A command that takes one of these calls a pool.
_ADDRESSES: Final = frozenset({"master", "pool"})


def _note(ctx: typer.Context, param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Set the variable for as long as the command runs."""
    variable = str(param.envvar)
    if value is not None and not ctx.resilient_parsing and os.environ.get(variable) != str(value):
        before = os.environ.get(variable)
        os.environ[variable] = str(value)
        ctx.call_on_close(lambda: _restore(variable, before))
    return value


def _restore(variable: str, before: str | None) -> None:
    if before is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = before


def _option(flag: str, variable: str, text: str) -> Any:
    return typer.Option(
        flag, help=text, envvar=variable, callback=_note, rich_help_panel=_PANEL, show_default=False, exists=True
    )


def _options(
    token_file: Annotated[
        Path | None, _option("--token-file", credentials.TOKEN_FILE, "File of the token to show to the masters.")
    ] = None,
    ca: Annotated[
        Path | None, _option("--ca", credentials.CA, "Authority of the pool's certificates, in PEM: TLS, always.")
    ] = None,
    cert: Annotated[Path | None, _option("--cert", credentials.CERT, "Own certificate, for mTLS.")] = None,
    key: Annotated[Path | None, _option("--key", credentials.KEY, "Its key.")] = None,
) -> None:
    """The shape of the options; it is never called."""


class PoolGroup(TyperGroup):
    """Gives every command within it that calls a pool the options of its credentials."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        template = typer.Typer(add_completion=False)
        template.command()(_options)
        _add(self.commands, [each for each in typer.main.get_command(template).params if each.name != "help"])


def _add(commands: Mapping[str, Any], options: list[Any]) -> None:
    for command in commands.values():
        if hasattr(command, "commands"):
            _add(command.commands, options)
            continue
        names = {param.name for param in command.params}
        if names & _ADDRESSES and "token_file" not in names:
            for option in map(copy.copy, options):
                option.expose_value = False
                command.params.append(option)

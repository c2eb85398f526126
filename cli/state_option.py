"""Where a master keeps what outlives it: ``--state`` and the password of the Redis it may name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstrata.master.stores.redis_url import has_password
from kvstrata.proto.errors import ConfigError


def _not_in_sight(ctx: typer.Context, spec: str | None) -> str | None:
    """Whoever may list the processes of a machine reads their flags."""
    source = ctx.get_parameter_source("state")
    if spec and has_password(spec) and source is not None and source.name == "COMMANDLINE":
        raise ConfigError(
            "--state holds a password, and flags are seen by everybody on this machine: put it into a file and give "
            "--state-password-file, or set KVSTRATA_MASTER_STATE, or write state: into the --config file"
        )
    return spec


State = Annotated[
    str | None,
    typer.Option(
        "--state",
        help="What must outlive a restart: a SQLite file, or the redis:// URL that all masters share; none: memory.",
        metavar="PATH|URL",
        callback=_not_in_sight,
        show_default=False,
    ),
]
StatePasswordFile = Annotated[
    Path | None,
    typer.Option("--state-password-file", help="File with the password of the Redis of --state.", show_default=False),
]

"""The command line in this process: what ``kvstrata ...`` prints and how it ends, without an interpreter's start.

For what a process of its own shows nothing more of; daemons, signals, limits and terminals want a real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from unittest import mock

from typer.testing import CliRunner

from kvstrata.cli import daemons
from kvstrata.cli.app import app
from kvstrata.cli.output import Exit
from kvstrata.cli.settings import PREFIX
from kvstrata.proto.errors import KVError


@dataclass(frozen=True)
class Done:
    """A command that has ended, as :class:`subprocess.CompletedProcess` says it."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str, env: Mapping[str, str | None] | None = None, typed: str | None = None) -> Done:
    """Run to its end, as ``main`` does; what ``env`` maps to None is unset. What should be no traceback raises."""
    with mock.patch.object(daemons, "configure_logs"):  # this process keeps its own
        result = CliRunner().invoke(app, arguments, input=typed, env=env, auto_envvar_prefix=PREFIX)
    code, said = result.exit_code, result.stderr
    if isinstance(result.exception, KVError):
        code, said = int(Exit.USAGE), f"{said}error: {result.exception}\n"
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(code, result.stdout, said)

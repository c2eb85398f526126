"""What commands print, and how they end: tables for people, JSON for scripts, exit codes that mean something."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import typer

from kvstrata.proto.errors import ConfigError, InvalidArgument, KVError, Unavailable

PLAIN_COLUMNS = 160
#: What stands in place of a character that a terminal would obey.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1  #: it ran, and the answer is bad: unhealthy, wrong bytes, failed requests
    USAGE = 2  #: a flag, a file or an environment variable is wrong; a port is in use
    UNREACHABLE = 3  #: nobody answers there


def plain(text: object) -> str:
    """What came from outside, for a terminal: none of the characters that it would obey."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(REPLACEMENT if unicodedata.category(each)[0] == "C" else each for each in shown)


def say(text: str, *, err: bool = False) -> None:
    """Lines on stdout, or on stderr, each :func:`plain`."""
    typer.echo("\n".join(plain(line) for line in text.split("\n")), err=err)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout; what is too wide for the terminal is folded, never cut: it may be copied from."""
    from rich.table import Column, Table
    from rich.text import Text

    heading = Text(plain(title), "table.title") if title else None
    table = Table(*(Column(name, overflow="fold") for name in columns), title=heading, title_justify="left")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))  # names come from outside: no markup of theirs
    print_rich(table)


def print_rich(*renderables: Any) -> None:
    """Print to stdout: as wide as the terminal, or ``PLAIN_COLUMNS`` wide where there is none (a file, a pipe)."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=PLAIN_COLUMNS)
    console.print(*renderables)


@contextlib.contextmanager
def expected_errors() -> Iterator[None]:
    """Turn what can go wrong into one message on stderr and an exit code; never a traceback."""
    try:
        yield
    except (ConfigError, InvalidArgument) as error:
        raise _ended(error, Exit.USAGE) from error
    except Unavailable as error:
        raise _ended(error, Exit.UNREACHABLE) from error
    except KVError as error:
        raise _ended(error, Exit.FAILED) from error


def _ended(error: KVError, code: Exit) -> typer.Exit:
    say(f"error: {error}", err=True)
    return typer.Exit(int(code))

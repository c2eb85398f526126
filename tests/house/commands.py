"""Whether a command line that a page shows would be taken."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer.main

from kvstrata.cli.app import app

#: What stands for something in examples, and something that it can be.
_STANDS_FOR = {"N": "node-1", "...": "", "BUDGET": "10m", "NAME": "name", "SALT": "team-a", "REQUEST": "cmpl-1"}


def options(command: Any) -> list[str]:
    """Long names of a command's options."""
    names = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    return [name for name in names if name.startswith("--") and name != "--help"]


def words(line: str) -> list[str]:
    """The words of one command of a shell line, without its comment, redirections and what is piped on."""
    line = re.split(r"\s#\s|\s#$", line)[0]
    found: list[str] = []
    for word in shlex.split(line, comments=False):
        if word in ("|", "&", "&&", ";", ">", "<", ">>", "2>&1"):
            break
        word = _expanded(_STANDS_FOR.get(word, word))
        if word:
            found.append(word.rstrip(";"))
    return found


def _expanded(word: str) -> str:
    """Shell variables as something that they can be: masters' addresses, or a number."""
    word = re.sub(r"\$\{\w+:-(.*)\}", r"\1", word)
    return re.sub(r"\$\{?(\w+)\}?", lambda found: "127.0.0.1:7400" if found[1] == "KVSTRATA_MASTER" else "1", word)


def parse(line: str, folder: Path) -> str:
    """What is wrong with a command line that begins after ``kvstrata``; empty when nothing is."""
    command: Any = typer.main.get_command(app)
    given = words(line)
    while hasattr(command, "commands"):
        if not given or given[0].startswith("-"):
            return "" if given in (["--help"], ["--version"], ["--install-completion"]) else "names no command"
        name = given.pop(0)
        if name not in command.commands:
            return f"{name!r} is no command"
        command = command.commands[name]
    if "--help" in given:
        return ""
    try:
        with command.make_context(command.name, _with_file(given, folder)) as context:
            return f"{context.args} is too much" if context.args else ""
    except Exception as error:  # noqa: BLE001  whatever it says is told of
        if "does not exist" in str(error) and type(error).__name__ == "BadParameter":
            return ""  # a file that is not on this machine
        return f"{type(error).__name__}: {getattr(error, 'message', None) or error}"


def _with_file(given: list[str], folder: Path) -> list[str]:
    """``--config FILE`` names a file that is not here: an empty one stands for it."""
    if "--config" not in given:
        return given
    empty = folder / "empty.yaml"
    empty.touch()
    at = given.index("--config")
    return [*given[: at + 1], str(empty), *given[at + 2 :]]

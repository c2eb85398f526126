"""Commands, options, configuration keys and variables, from the typer application."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstrata.cli.command_tree import leaves
from kvstrata.cli.settings import PREFIX
from kvstrata.cli.sizes import format_size

#: Commands that run for long, whose options people keep in files.
DAEMONS = ("master", "storage", "serve", "dev")
_NOWHERE = {"help", "config", "install_completion", "show_completion"}


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands_page() -> str:
    """``reference/commands.md``."""
    found = list(leaves())
    lines = [
        "# Commands",
        "",
        "Every command with its options and defaults, as `--help` prints them. How values come from files and "
        "variables, and what exit codes mean, is in [The command line](../cli.md).",
        "",
        "| command | |",
        "|---|---|",
        *(f"| [`{' '.join(path)}`](#{'-'.join(path)}) | {cell(_summary(command))} |" for path, command in found),
        "",
    ]
    for path, command in found:
        lines += _command(path, command)
    return "\n".join(lines) + "\n"


def _summary(command: Any) -> str:
    return str(command.help or "").strip().split("\n\n")[0]


def _command(path: tuple[str, ...], command: Any) -> list[str]:
    shown = [each for each in command.params if each.name != "help" and not getattr(each, "hidden", False)]
    arguments = [each for each in shown if _is_argument(each)]
    options = [each for each in shown if not _is_argument(each)]
    usage = " ".join(["kvstrata", *path, "[OPTIONS]" if options else "", *map(_placeholder, arguments)])
    lines = [f"## {' '.join(path)} {{#{'-'.join(path)}}}", "", inspect.cleandoc(str(command.help or "")), ""]
    lines += ["```text", " ".join(usage.split()), "```", ""]
    if arguments:
        lines += ["| argument | |", "|---|---|"]
        lines += [f"| `{_placeholder(each)}` | {cell(each.help or '')} |" for each in arguments] + [""]
    if options:
        hints = typing.get_type_hints(command.callback)
        lines += ["| option | default | |", "|---|---|---|"]
        lines += [f"| {_flags(each, hints)} | {default(each)} | {cell(each.help or '')} |" for each in options] + [""]
    return lines


def _is_argument(parameter: Any) -> bool:
    return getattr(parameter, "param_type_name", "") == "argument" or not parameter.opts[0].startswith("-")


def _placeholder(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper())
    name += "..." if argument.nargs == -1 and not name.endswith("...") else ""
    return name if argument.required else f"[{name}]"


def _flags(option: Any, hints: dict[str, Any]) -> str:
    names = " / ".join([*option.opts, *option.secondary_opts])
    kind = value_kind(option, hints.get(option.name))
    return f"`{names}`" + (f" {kind}" if kind else "")


def value_kind(option: Any, hint: Any) -> str:
    """What an option's value looks like: choices, or the kind of value; empty for a switch."""
    if option.metavar:
        return f"`{option.metavar}`"
    kinds = [each for each in _flat(hint) if each is not type(None)]
    if not kinds or kinds == [bool]:
        return ""
    if isinstance(kinds[0], type) and issubclass(kinds[0], enum.Enum):
        return ", ".join(f"`{each.value}`" for each in kinds[0])
    names = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}
    return f"`{names.get(kinds[0], 'TEXT')}`"


def _flat(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType, list, tuple, typing.Annotated):
        for each in typing.get_args(hint):
            yield from _flat(each)
    elif hint is not None:
        yield hint


def default(parameter: Any) -> str:
    """The default as it would be typed; empty where there is none."""
    value = parameter.default
    if parameter.required:
        return "*required*"
    if value is None or value == "" or value == [] or callable(value):
        return ""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and "SIZE" in str(parameter.metavar or "").upper():
        value = format_size(value)
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return f"`{value}`"


def configuration_page() -> str:
    """``reference/configuration.md``."""
    lines = [
        "# Configuration files and variables",
        "",
        "Every option can be given by a flag, else by a variable, else in the YAML file of `--config`, else it has its "
        "default. The rules are in [The command line](../cli.md#where-a-value-comes-from). Here are the keys of the "
        "commands that run for long; all other commands follow the same pattern.",
        "",
        "```yaml",
        "# kvstrata.yaml: a section a command",
        "master:",
        "  listen: 10.0.0.1:7400",
        "  state: /var/lib/kvstrata/master.db",
        "storage:",
        "  master: 10.0.0.1:7400",
        "  dram: 64GiB",
        "  ssd: [/mnt/nvme0/kvstrata=3TiB, /mnt/nvme1/kvstrata=3TiB]",
        "```",
        "",
    ]
    for path, command in leaves():
        if len(path) == 1 and path[0] in DAEMONS:
            lines += _keys(path[0], command)
    return "\n".join(lines) + "\n"


def _keys(name: str, command: Any) -> list[str]:
    rows = []
    for each in command.params:
        if each.name in _NOWHERE or _is_argument(each):
            continue
        variable = f"{PREFIX}_{name.upper()}_{each.name.upper()}"
        also = f"; `{each.envvar}`" if each.envvar else ""
        rows.append(f"| `{each.name}` | `{variable}`{also} | {default(each)} | {cell(each.help or '')} |")
    return [f"## {name}", "", "| key | variable | default | |", "|---|---|---|---|", *rows, ""]

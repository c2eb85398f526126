"""Where an option's value comes from: flag, then environment, then ``--config`` file, then the default.

The file is YAML: a mapping of option names (``listen: 0.0.0.0:7400``), or of command names to such
mappings, so that one file can serve every command. Environment variables are
``KVSTRATA_<COMMAND>_<OPTION>``. A key that no option has is refused, with the nearest one that exists.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

import typer
import yaml

from kvstrata.proto.errors import ConfigError

PREFIX = "KVSTRATA"
FILE_BYTES_MAX = 1 << 20
#: What Kubernetes puts into every container for a service called ``kvstrata-master``: nobody's option.
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Callback of ``--config``: put the file's values behind flags and environment."""
    check_environment(ctx, dict(os.environ))
    if path is None or ctx.resilient_parsing:
        return path
    values = _for_command(ctx, read_file(path))
    names = _option_names(ctx.command)
    for key in values:
        if _canonical(key) not in names:
            raise ConfigError(f"{path}: unknown key {key!r}{_nearest(_canonical(key), names)}")
    given = {_canonical(key): value for key, value in values.items()}
    for parameter in ctx.command.params:  # what may be given several times may be written without a list once
        if getattr(parameter, "multiple", False) and isinstance(given.get(parameter.name or ""), str):
            given[parameter.name or ""] = [given[parameter.name or ""]]
    ctx.default_map = {**(ctx.default_map or {}), **given}
    return path


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises :class:`ConfigError` saying what is wrong where."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes: is it a configuration file?")
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # PyYAML lets those of what it calls through: 2026-02-30 is a ValueError
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must be a mapping of option names to values")
    return values


def check_environment(ctx: typer.Context, environment: dict[str, str]) -> None:
    """Refuse ``KVSTRATA_<COMMAND>_...`` variables of this command that name no option."""
    names = _option_names(ctx.command)
    prefix = f"{PREFIX}_{(ctx.command.name or '').upper().replace('-', '_')}_"
    known = {prefix + name.upper() for name in names}
    for variable in environment:
        if not variable.startswith(prefix) or _SERVICE_LINK.fullmatch(variable.removeprefix(prefix)):
            continue
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}{_nearest(variable, known)}")


def _for_command(ctx: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """A file of sections gives this command's; a flat file gives itself."""
    sections = {key: value for key, value in values.items() if isinstance(value, dict)}
    if not sections:
        return values
    if len(sections) != len(values):
        raise ConfigError("a configuration file holds either options or one section a command, not both")
    commands = set(getattr(ctx.parent.command, "commands", ())) if ctx.parent else set()
    for key in sections:
        if key not in commands:
            raise ConfigError(f"a configuration file's sections are commands, {key!r} is none{_nearest(key, commands)}")
    return sections.get(ctx.command.name or "", {})


def _option_names(command: Any) -> set[str]:
    hidden = {"config", "help", "install_completion", "show_completion"}
    return {parameter.name for parameter in command.params if parameter.name} - hidden


def _canonical(key: str) -> str:
    return key.replace("-", "_").lower()


def _nearest(name: str, names: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f": did you mean {close[0]!r}?" if close else f": known are {', '.join(sorted(names))}"

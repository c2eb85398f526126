"""The rows of a token file as they are written: added, listed, taken away; each result goes through the servers' own
parser before it replaces the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from kvstrata.cli.secret_files import write_secret
from kvstrata.proto.errors import ConfigError, InvalidArgument
from kvstrata.transfer.security.rights import Role
from kvstrata.transfer.security.tokens import TokenFile, digest, new_token, parse_rows
from kvstrata.transfer.security.watched_file import check_size

_HEADER: Final = (
    "# Who may call: hashes of tokens, roles, and what each may touch. Read again when it changes.\n"
    "# kvstrata auth token add, list, remove.\n"
)

Row = dict[str, Any]


def row_of(
    name: str,
    role: Role,
    salts: Sequence[str],
    groups: Sequence[str],
    *,
    reset: bool = False,
    certificate: str = "",
) -> tuple[Row, str]:
    """(a row, the token that goes with it: "" where a certificate does)."""
    token = "" if certificate else new_token()
    row: Row = {"name": name, "role": role.value}
    row |= {"certificate": certificate} if certificate else {"sha256": digest(token)}
    if reset and role is not Role.CLIENT:
        raise InvalidArgument(f"--reset is for the role client: {role.value} cannot use it")
    if salts or role is Role.CLIENT:
        row["salts"] = list(salts) or ["*"]
    if groups or role is Role.CLIENT:
        row["groups"] = list(groups) or ["*"]
    if reset:
        row["reset"] = True
    return row, token


def add(path: Path, row: Row) -> None:
    """Raises :class:`ConfigError` when a row of this name is there."""
    rows = read(path) if path.exists() else []
    if any(each.get("name") == row["name"] for each in rows):
        raise ConfigError(f"{path} has a row {row['name']!r} already: remove it first, or choose another name")
    write(path, [*rows, row])


def remove(path: Path, name: str) -> None:
    """Raises :class:`ConfigError` when there is none, and for the last one."""
    rows = read(path)
    kept = [each for each in rows if each.get("name") != name]
    if len(kept) == len(rows):
        raise ConfigError(f"{path} has no row {name!r}: there are {', '.join(str(each.get('name')) for each in rows)}")
    if not kept:
        raise ConfigError(f"{name!r} is the last row of {path}: nobody could call any more")
    write(path, kept)


def read(path: Path) -> list[Row]:
    """Raises :class:`ConfigError` for what a server would not take."""
    TokenFile(path)
    return list(yaml.safe_load(path.read_text()))


def write(path: Path, rows: Sequence[Row]) -> None:
    """Raises :class:`ConfigError` for what a server would not take: then the file is as it was."""
    content = (_HEADER + yaml.safe_dump(list(rows), sort_keys=False)).encode()
    check_size(content, path, "tokens")
    parse_rows(content, path)
    write_secret(path, content)

"""The lines of a ticket-key file, and how they change: add a key, let it sign, take the others away."""

from __future__ import annotations

import enum
import secrets
from pathlib import Path
from typing import Final

from kvstrata.cli.secret_files import write_secret
from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.tickets import KEY_BYTES, TicketKeys

_HEADER: Final = (
    "# Ticket keys: the first one signs, all are believed. The same file on every master and storage node.\n"
    "# Who has it can be anybody: kvstrata auth keys rotate changes it.\n"
)


class Step(enum.StrEnum):
    """Of a rotation, in this order: every process has to have the file of one step before the next."""

    ADD = "add"
    SIGN = "sign"
    RETIRE = "retire"


def write_first(path: Path) -> None:
    """A file with one key."""
    _write(path, {_new_id({}): secrets.token_bytes(KEY_BYTES)})


def rotate(path: Path, step: Step) -> str:
    """Change the file; returns what to do next. Raises :class:`ConfigError` where the step before was left out."""
    keys = dict(KeyFile(path).keys().secrets)
    first, *others = keys
    if step is Step.ADD:
        if others:
            raise ConfigError(f"{path} has {len(keys)} keys already: go on with --step sign, then --step retire")
        keys[_new_id(keys)] = secrets.token_bytes(KEY_BYTES)
        told = "when every master and node has this file (seconds after it is there): --step sign"
    elif step is Step.SIGN:
        if not others:
            raise ConfigError(f"{path} has one key only: --step add comes first")
        keys = {others[-1]: keys[others[-1]], **keys}
        told = "when every master has this file, wait until older tickets have run out (12 minutes): --step retire"
    else:
        if not others:
            raise ConfigError(f"{path} has one key only: there is none to take away")
        keys = {first: keys[first]}
        told = "done, once every master and node has this file"
    _write(path, keys)
    return told


def ids(path: Path) -> list[str]:
    """The keys' ids, the one that signs first."""
    return list(KeyFile(path).keys().secrets)


def _write(path: Path, keys: dict[str, bytes]) -> None:
    lines = "".join(f"{name}:{secret.hex()}\n" for name, secret in keys.items())
    TicketKeys.parse(lines)
    write_secret(path, (_HEADER + lines).encode())


def _new_id(taken: dict[str, bytes]) -> str:
    while (name := f"k{secrets.token_hex(3)}") in taken:
        pass
    return name

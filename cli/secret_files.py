"""Files that are replaced in one step, and secrets among them that nobody else may read, not even for a moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvstrata.proto.errors import ConfigError

SECRET_MODE: Final = 0o600
PUBLIC_MODE: Final = 0o644


def write_secret(path: Path, content: bytes) -> None:
    """Raises :class:`ConfigError` when it cannot be written."""
    _replace(path, content, SECRET_MODE)


def write_public(path: Path, content: bytes) -> None:
    """Raises :class:`ConfigError` when it cannot be written."""
    _replace(path, content, PUBLIC_MODE)


def _replace(path: Path, content: bytes, mode: int) -> None:
    """A file that is there keeps its owner's group and mode."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        there = path.stat() if path.exists() else None
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, SECRET_MODE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                if there is not None and os.geteuid() == 0:
                    os.fchown(file.fileno(), there.st_uid, there.st_gid)
                os.fchmod(file.fileno(), there.st_mode & 0o777 if there is not None else mode)
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error

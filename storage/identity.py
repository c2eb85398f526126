"""The data directory: who this node is, and that it is the only one here.

The node id is made once and kept; the incarnation is new at each start: a persisted counter in the high 32
bits, random in the low, so that it is new even after the directory was restored from a copy.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstrata.proto.errors import ConfigError
from kvstrata.storage import durable_file

FORMAT: Final = 1
_IDENTITY: Final = "identity.json"
_LOCK: Final = "lock"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """``incarnation`` is 64 bits and grows with each start of this node id."""

    node_id: str
    incarnation: int


class DataDirectory:
    """Holds the directory's lock from construction to :meth:`close` (or the process's end).

    Raises :class:`ConfigError` when another process has it, when it cannot be written, when what is in it
    is not ours, or when it belongs to a node of another name.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(f"node name {name!r}: use 1 to 64 letters, digits, dots, dashes and underscores")
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot use {path} as data directory: {error.strerror or error}") from error
        try:
            self._take_lock()
            self.identity = self._next_identity(name)
        except BaseException:
            os.close(self._lock)
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"{self.path} is in use by process {holder}: stop that node, or give this one a directory of its own"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _next_identity(self, name: str | None) -> NodeIdentity:
        file = self.path / _IDENTITY
        node_id, starts = self._read(file) if file.exists() else (name or f"node-{secrets.token_hex(6)}", 0)
        if name is not None and node_id != name:
            raise ConfigError(f"{self.path} belongs to node {node_id!r}, not {name!r}: use another directory")
        starts += 1
        _write_durably(file, {"format": FORMAT, "node_id": node_id, "starts": starts})
        return NodeIdentity(node_id, starts << 32 | secrets.randbits(32))

    def _read(self, file: Path) -> tuple[str, int]:
        """(node id, starts so far)."""
        try:
            kept = json.loads(file.read_bytes())
            version, node_id, starts = kept["format"], kept["node_id"], kept["starts"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be read ({error}): move it away to start as a new node") from error
        if version != FORMAT:
            raise ConfigError(f"{file} has format {version}, this version reads {FORMAT}: use the newer kvstrata")
        if not isinstance(node_id, str) or not _NAME.fullmatch(node_id) or not isinstance(starts, int) or starts < 0:
            raise ConfigError(f"{file} is damaged: move it away to start as a new node")
        return node_id, starts & 0x7FFFFFFF

    def close(self) -> None:
        """Let another process have the directory. Safe twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _write_durably(file: Path, record: dict[str, Any]) -> None:
    try:
        durable_file.replace(file, json.dumps(record).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error

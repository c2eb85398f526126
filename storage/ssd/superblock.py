"""A device's directory: whose it is, how it is laid out, and that one process has it.

::

    lock         flock; names its holder
    superblock   two copies (.0, .1): format, node, device id, sizes, how often it was started
    extents      preallocated
    removals     preallocated (storage/ssd/removal_log.py)

The superblock says "formatting" until the files are there, so that a start that was interrupted begins anew,
while a directory whose superblocks are lost is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import xxhash

from kvstrata.proto.errors import ConfigError
from kvstrata.storage.ssd.base import SECTOR_BYTES

FORMAT: Final = 1
_COPIES: Final = ("superblock.0", "superblock.1")
_LOCK: Final = "lock"
Record = dict[str, object]
#: Format n -> what makes a record of format n + 1 of it. A version that changes the layout adds its step here.
UPGRADES: Final[dict[int, Callable[[Record], Record]]] = {}


@dataclass(frozen=True, slots=True)
class Superblock:
    """``starts`` counts the node's starts: numbers made from it are new at each. ``served`` is the last of them
    in which all its devices were there, so that one that was away since is known by it. ``ring`` is the id of the
    keys that payloads are encrypted with (storage/ssd/tenant_keys.py), or empty: they are not.
    """

    node_id: str
    device: str  #: 16 bytes, hex
    extent_bytes: int
    extents: int
    removal_bytes: int
    starts: int = 0
    served: int = 0
    ready: bool = False
    ring: str = ""

    @property
    def device_id(self) -> bytes:
        return bytes.fromhex(self.device)


class Folder:
    """The directory of one device, locked from construction to :meth:`close` (or the process's end).

    Raises :class:`ConfigError` when it cannot be used, another process has it, or what is there is not ours.
    """

    def __init__(self, path: Path, node_id: str) -> None:
        self.path = path
        self.node_id = node_id
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot use {path} for SSD blocks: {error.strerror or error}") from error
        try:
            self._take_lock()
            self.superblock = self._load()
        except BaseException:
            self.close()
            raise

    @property
    def extents(self) -> Path:
        return self.path / "extents"

    @property
    def removals(self) -> Path:
        return self.path / "removals"

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{self.path} is in use by {_holder(self._lock)}: "
                "stop that node, or give this one a directory of its own"
            ) from error
        os.ftruncate(self._lock, 0)
        mine = {"node_id": self.node_id, "pid": os.getpid(), "host": socket.gethostname()}
        os.pwrite(self._lock, json.dumps(mine).encode(), 0)

    def _load(self) -> Superblock | None:
        """What the directory was made for; None when it is new."""
        present = [self.path / name for name in _COPIES if (self.path / name).exists()]
        if not present:
            if self.extents.exists():
                raise ConfigError(
                    f"{self.path} holds blocks and no superblock: put it back, or remove {self.extents} to start empty"
                )
            return None
        read = [record for file in present if (record := _read(file)) is not None]
        if not read:
            raise ConfigError(
                f"{present[0]} is damaged, and so is its copy: move the files of {self.path} away to start empty"
            )
        found = max((self._understood(record) for record in read), key=lambda superblock: superblock.starts)
        if found.node_id != self.node_id:
            raise ConfigError(
                f"{self.path} belongs to node {found.node_id!r}, not {self.node_id!r}: "
                "start that node here, or give this one another directory"
            )
        return found

    def _understood(self, record: Record) -> Superblock:
        version = record.get("format")
        while isinstance(version, int) and version < FORMAT and version in UPGRADES:
            record = UPGRADES[version](record)
            version = record.get("format")
        if version != FORMAT:
            raise ConfigError(
                f"{self.path} has format {version}, this version reads {FORMAT}: start the kvstrata that wrote it, "
                "or move the files away to start empty"
            )
        fields = {name: value for name, value in record.items() if name != "format"}
        try:
            return Superblock(**fields)  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(f"the superblock of {self.path} is malformed ({error})") from error

    def save(self, superblock: Superblock) -> None:
        """Make it durable, one copy after the other. Raises OSError."""
        body = json.dumps({"format": FORMAT, **asdict(superblock)}, sort_keys=True)
        text = f"{xxhash.xxh3_64_hexdigest(body.encode())}\n{body}\n".encode()
        for name in _COPIES:
            replace_durably(self.path / name, text)
        self.superblock = superblock

    def lay_out(
        self,
        extent_bytes: int,
        extents: int,
        removal_bytes: int,
        start: int,
        opening: bytes,
        *,
        anew: bool = False,
        ring: str = "",
    ) -> bool:
        """Make or check the files; True when they are all new. Raises ConfigError when there is no room, OSError.

        ``start`` is this start's number, ``opening`` what a new file of removals begins with, ``anew``: forget
        what is there, ``ring``: the keys of new files. An extent file that is too short (a
        truncated one) is filled up with zeros: what was there is a miss.
        """
        now = self.superblock
        fresh = anew or now is None or not now.ready
        if now is None or fresh:
            now = Superblock(self.node_id, secrets.token_hex(16), extent_bytes, extents, removal_bytes, ring=ring)
        elif extents < now.extents:
            raise ConfigError(
                f"{self.path} holds {now.extents * now.extent_bytes} bytes of extents, more than it is now given: "
                f"give it at least {footprint(now.extent_bytes, now.extents, now.removal_bytes)}, "
                "or move its files away to start empty"
            )
        # "Not ready" is durable before the first file: see the module.
        self.save(replace(now, starts=start, extents=extents if fresh else now.extents))
        self._allocate(self.extents, extent_bytes * extents, fresh)
        if fresh:
            self._allocate(self.removals, removal_bytes, fresh, opening)
        assert self.superblock is not None
        if fresh or extents != now.extents:
            self.save(replace(self.superblock, extents=extents, ready=True))
        return fresh

    def _allocate(self, file: Path, nbytes: int, fresh: bool, opening: bytes = b"") -> None:
        if fresh:
            file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            before = os.fstat(descriptor).st_size
            if before < nbytes:
                os.posix_fallocate(descriptor, before, nbytes - before)
                os.pwrite(descriptor, opening, 0)
                os.fsync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = os.statvfs(self.path)
            raise ConfigError(
                f"{self.path} has no room for {nbytes} bytes ({free.f_bavail * free.f_frsize + before} are to be had): "
                "give the SSD tier less, or free some space"
            ) from error
        finally:
            os.close(descriptor)
        sync_directory(self.path)

    def close(self) -> None:
        """Let another process have the directory. Safe twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def footprint(extent_bytes: int, extents: int, removal_bytes: int) -> int:
    """Bytes that a device takes of its file system, but for a few sectors."""
    return extent_bytes * extents + removal_bytes


def replace_durably(file: Path, text: bytes) -> None:
    """Replace a small file whole: after a crash it holds the old text or the new one. Raises OSError."""
    fresh = file.with_name(file.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.replace(file)
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """Make names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(file: Path) -> Record | None:
    """The record of a copy that is whole, else None."""
    try:
        text = file.read_bytes()
    except OSError:
        return None
    checksum, _, body = text.partition(b"\n")
    if checksum.decode("ascii", "replace") != xxhash.xxh3_64_hexdigest(body.rstrip(b"\n")):
        return None
    record = json.loads(body)
    return record if isinstance(record, dict) else None


def _holder(lock: int) -> str:
    try:
        told = json.loads(os.pread(lock, SECTOR_BYTES, 0))
        return f"node {told['node_id']!r}, process {told['pid']} on {told['host']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"

"""The removals of a device, in order, in a preallocated file: a removal is durable before it is confirmed.

Records are whole sectors: a header with a checksum of its own, the body, an end mark. Each says its number and
the one that its log begins with; the first two are empty, so that a log never is. What a crash may leave at the
end is told from damage: a torn record lacks whole sectors, a damaged one is complete and wrong. After damage,
either the numbers that are missing are known, and another device's log may have them, or nobody knows what was
lost: see :class:`LogContent`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import xxhash

from kvstrata.storage.ssd.base import SECTOR_BYTES
from kvstrata.storage.ssd.raw_file import OpenFile, RawFile, aligned_buffer, read_fully, write_fully
from kvstrata.storage.ssd.slots import is_blank, padded
from kvstrata.storage.ssd.superblock import sync_directory

_MAGIC: Final = b"kvsRmvd1"
_HEAD: Final = struct.Struct("<8sQQQQ")  #: magic, number, first number, bytes of the body, checksum of the body
_SUM: Final = struct.Struct("<Q")
_HEAD_BYTES: Final = _HEAD.size + _SUM.size
_END: Final = b"kvsEnd.\n"
#: Read and written at a time.
_PIECE_BYTES: Final = 1 << 20
#: Empty records at the beginning.
OPENING_RECORDS: Final = 2


class LogFull(Exception):
    """The record does not fit: the log has to be compacted first."""


@dataclass(slots=True)
class LogContent:
    """What a log says: bodies by number, where to go on, and what is missing.

    ``lost`` are numbers that were there once; None when even that cannot be told.
    """

    bodies: dict[int, bytes] = field(default_factory=dict)
    end: int = 0
    lost: set[int] | None = field(default_factory=set)

    @property
    def damaged(self) -> bool:
        return self.lost is None or bool(self.lost)


@dataclass(frozen=True, slots=True)
class _Record:
    number: int
    begin: int
    body: bytes
    nbytes: int


def encode_record(number: int, begin: int, body: bytes) -> bytes:
    """Whole sectors."""
    head = _HEAD.pack(_MAGIC, number, begin, len(body), xxhash.xxh3_64_intdigest(body))
    text = head + _SUM.pack(xxhash.xxh3_64_intdigest(head)) + body
    return text.ljust(padded(len(text) + len(_END)) - len(_END), b"\0") + _END


def encode_opening(begin: int) -> bytes:
    """What a new log begins with."""
    return b"".join(encode_record(begin + i, begin, b"") for i in range(OPENING_RECORDS))


def read_log(text: memoryview) -> LogContent:
    """Read all sound records of a log's file, also beyond damage."""
    content = LogContent()
    at, begin, damaged_end = 0, 0, False
    while at < len(text):
        record = _record_at(text, at)
        if record is None:
            follower = _next_record(text, at + SECTOR_BYTES)
            if follower is None:
                damaged_end = not _torn(text, at)
                break
            at = follower
            continue
        content.bodies[record.number] = record.body
        begin = record.begin
        at += record.nbytes
        content.end = at
    if damaged_end or not content.bodies:
        content.lost = None
    else:
        whole = set(range(begin + OPENING_RECORDS, max(content.bodies) + 1))
        content.lost = whole - content.bodies.keys()
    return content


def _head_at(text: memoryview, at: int) -> tuple[int, int, int, int, int] | None:
    """(number, first number, body bytes, body checksum, record bytes) of a sound header."""
    if bytes(text[at : at + len(_MAGIC)]) != _MAGIC or at + _HEAD_BYTES > len(text):
        return None
    head = text[at : at + _HEAD.size]
    (checksum,) = _SUM.unpack_from(text, at + _HEAD.size)
    if checksum != xxhash.xxh3_64_intdigest(head):
        return None
    _, number, begin, body_bytes, body_checksum = _HEAD.unpack(head)
    nbytes = padded(_HEAD_BYTES + body_bytes + len(_END))
    return (number, begin, body_bytes, body_checksum, nbytes) if at + nbytes <= len(text) else None


def _record_at(text: memoryview, at: int) -> _Record | None:
    head = _head_at(text, at)
    if head is None:
        return None
    number, begin, body_bytes, checksum, nbytes = head
    body = bytes(text[at + _HEAD_BYTES : at + _HEAD_BYTES + body_bytes])
    if xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    return _Record(number, begin, body, nbytes)


def _next_record(text: memoryview, at: int) -> int | None:
    return next((p for p in range(at, len(text), SECTOR_BYTES) if _record_at(text, p) is not None), None)


def _torn(text: memoryview, at: int) -> bool:
    """What begins here was never written whole: a sector of it, and no part of a sector, is missing."""
    if is_blank(text[at : at + SECTOR_BYTES]):
        return True  # the rest may be there or not: nobody was told that it is
    head = _head_at(text, at)
    if head is None:
        return False
    return any(is_blank(text[p : p + SECTOR_BYTES]) for p in range(at, at + head[-1], SECTOR_BYTES))


class RemovalLog:
    """Appends to one file, new at each start. Not thread-safe; after an OSError it must not be used again."""

    def __init__(self, file: RawFile, nbytes: int, end: int, begin: int) -> None:
        self.file = file
        self.nbytes = nbytes
        self.end = end
        self.begin = begin

    @property
    def fill(self) -> float:
        """Part of the file in use."""
        return self.end / self.nbytes

    def append(self, number: int, entries: Sequence[bytes]) -> None:
        """Durable when it returns. Raises :class:`LogFull` before anything is written."""
        text = encode_record(number, self.begin, b"".join(entries))
        if self.end + len(text) > self.nbytes:
            raise LogFull(f"{len(text)} bytes do not fit: {self.end} of {self.nbytes} are in use")
        _write(self.file, text, self.end)
        self.file.flush()
        self.end += len(text)

    def close(self) -> None:
        self.file.close()


def load(file: RawFile, nbytes: int) -> LogContent:
    """Read a whole log. Raises OSError."""
    text = aligned_buffer(nbytes)
    # A piece at a time, so that a device that is slow is not taken for one that is stuck.
    for at in range(0, nbytes, _PIECE_BYTES):
        read_fully(file, text[at : at + _PIECE_BYTES], at)
    return read_log(text)


def _write(file: RawFile, text: bytes, offset: int) -> None:
    memory = aligned_buffer(len(text))
    memory[:] = text
    write_fully(file, memory, offset)


def make(path: Path, nbytes: int, begin: int, entries: Sequence[bytes], open_file: OpenFile) -> RemovalLog:
    """A new log in the place of the one at ``path``, durable when it is returned.

    The old one stays until the new one is whole. Raises OSError, or :class:`LogFull`.
    """
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    file = open_file(fresh)
    try:
        opening = encode_opening(begin)
        _write(file, opening, 0)
        log = RemovalLog(file, nbytes, len(opening), begin)
        if entries:
            log.append(begin + OPENING_RECORDS, entries)
        file.flush()
        fresh.replace(path)
        sync_directory(path.parent)
    except BaseException:
        file.close()
        raise
    return log

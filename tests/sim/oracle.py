"""What may be read: every write by its number, and what has been taken away since.

The bytes of a block name the write they are of and are a pseudo-random stream of it, so that wrong, stale, torn,
reused and resurrected bytes all show.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK_BYTES = 256
_NUMBER = 8


class Violation(AssertionError):
    """An invariant that did not hold, in words."""


class Key(NamedTuple):
    group: str
    salt: str
    hash: bytes

    def __str__(self) -> str:
        return f"{self.salt or '-'}/{self.hash.hex()[:6]}"


@dataclass(slots=True)
class Write:
    """``reserved_at`` and ``committed_at`` are when its node did that, in the story's time."""

    number: int
    key: Key
    epoch: int
    node: str
    reserved_at: float
    data: bytes  #: what its block holds
    committed_at: float | None = None


@dataclass(slots=True)
class Clearing:
    """A removal, a drop or a bump; ``done_at`` is when it was acknowledged without naming a node not reached."""

    what: str
    group: str
    ordered_at: float
    salt: str | None = None
    hashes: frozenset[bytes] | None = None
    below_epoch: int | None = None
    done_at: float | None = None
    answered_at: float | None = None  #: also if it named nodes that were not reached; None: it need not last

    def covers(self, write: Write) -> bool:
        if self.group not in ("", write.key.group) or self.salt not in (None, write.key.salt):
            return False
        if self.hashes is not None and write.key.hash not in self.hashes:
            return False
        if self.below_epoch is not None:
            return write.epoch < self.below_epoch
        return write.reserved_at < self.ordered_at


def payload(number: int) -> bytes:
    """All bytes of a write."""
    head = number.to_bytes(_NUMBER, "little")
    return head + hashlib.shake_128(head).digest(BLOCK_BYTES - _NUMBER)


@dataclass
class Oracle:
    writes: dict[int, Write] = field(default_factory=dict)
    clearings: list[Clearing] = field(default_factory=list)
    reads: int = 0
    hits: int = 0

    def reserved(self, key: Key, epoch: int, node: str, now: float) -> Write:
        number = len(self.writes) + 1
        write = Write(number, key, epoch, node, now, payload(number))
        self.writes[write.number] = write
        return write

    def read(self, key: Key, epoch: int, data: bytes, acquired_at: float, where: str) -> None:
        """A reader was given these bytes, of a lease from ``acquired_at``: INV-1 and INV-2."""
        self.hits += 1
        write = self.judge(key, data, where)
        if write.epoch != epoch:
            raise Violation(f"INV-1: {key} read at epoch {epoch} on {where} has bytes of epoch {write.epoch}")
        self._cleared(write, acquired_at, where)

    def judge(self, key: Key, data: bytes, where: str) -> Write:
        """The write that these bytes are of."""
        write = self.writes.get(int.from_bytes(data[:_NUMBER], "little"))
        if write is None:
            raise Violation(f"INV-1: {key} on {where} has bytes that nobody wrote")
        if data != write.data:
            raise Violation(f"INV-1: {key} on {where} has torn bytes")
        if write.key != key:
            raise Violation(f"INV-1: {key} on {where} has the bytes of {write.key}")
        if write.committed_at is None:
            raise Violation(f"INV-2: {key} on {where} has bytes of a write that was not committed")
        return write

    def _cleared(self, write: Write, acquired_at: float, where: str) -> None:
        for clearing in self.clearings:
            if clearing.done_at is not None and clearing.done_at < acquired_at and clearing.covers(write):
                raise Violation(
                    f"INV-1: {write.key} is back on {where} at {acquired_at:.3f}: {clearing.what} was acknowledged at "
                    f"{clearing.done_at:.3f}, the write was reserved at {write.reserved_at:.3f}"
                )

    def revoked(self, key: Key, since: float) -> bool:
        """Whether leases on it may have been ended: by a drop or new weights, that is or was under way since."""
        return any(
            clearing.hashes is None
            and clearing.group in ("", key.group)
            and clearing.salt in (None, key.salt)
            and not (clearing.done_at is not None and clearing.done_at < since)
            for clearing in self.clearings
        )

    def standing(self, write: Write, now: float, where: str) -> None:
        """A node has it, visibly, at ``now``."""
        self._cleared(write, now, where)

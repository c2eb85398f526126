"""One call about blocks, as every part of the client that serves it sees it."""

from __future__ import annotations

import time

import msgspec

from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.plan import Positions, gather
from kvstrata.transfer.base import Named


class Asked(msgspec.Struct):
    """``count`` blocks by packed ``hashes``; ``limit`` bounds the blocks of one message. What is being tried now may
    take until ``attempt_deadline``."""

    namespace: PoolNamespace
    salt: str
    hashes: bytes
    count: int
    deadline: float
    limit: int
    attempt_deadline: float = 0.0

    def __post_init__(self) -> None:
        self.attempt_deadline = self.attempt_deadline or self.deadline

    def pace(self, *, others: bool) -> None:
        """Begin an attempt: it has all the time that is left, or half of it when ``others`` could still serve."""
        self.attempt_deadline = self.deadline
        if others and (now := time.monotonic()) < self.deadline:
            self.attempt_deadline = now + (self.deadline - now) / 2

    def named(self, positions: Positions) -> Named:
        """Some of the call's blocks, by name alone."""
        hashes = gather(self.hashes, self.namespace.hash_bytes, positions)
        return Named(self.namespace, self.salt, hashes, self.deadline, self.namespace.epoch)

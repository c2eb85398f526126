"""One call about blocks, as every part of the client that serves it sees it."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.plan import Positions, gather
from kvstrata.transfer.base import Named


@dataclass(slots=True)
class Asked:
    """``count`` blocks by packed ``hashes``; ``limit`` bounds the blocks of one message."""

    namespace: PoolNamespace
    salt: str
    hashes: bytes
    count: int
    deadline: float
    limit: int

    def named(self, positions: Positions) -> Named:
        """Some of the call's blocks, by name alone."""
        hashes = gather(self.hashes, self.namespace.hash_bytes, positions)
        return Named(self.namespace, self.salt, hashes, self.deadline, self.namespace.epoch)

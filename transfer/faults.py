"""A transport that fails on purpose, in front of a real one: for tests, drills and demonstrations.

Faults are drawn per block from a seeded generator, so a run can be repeated. Corruption is put into the
destination before verification, and verification is then always on: what must be caught is caught by the
code that ships.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import (
    Endpoint,
    Fetch,
    Fetched,
    Peer,
    Push,
    Pushed,
    StatusArray,
    Transport,
)
from kvstrata.transfer.in_front import PeerInFront
from kvstrata.transfer.regions import BlockView, Region


@dataclass(frozen=True, slots=True)
class Faults:
    """Rates are 0..1. ``lose``: a load's block answers NODE_LOST. ``evict``: EVICTED. ``corrupt``: one
    byte flips before verification. ``refuse``: a store's block answers REFUSED, nothing is written.
    ``delay_ms``: added before each call, bounded by its deadline."""

    lose: float = 0.0
    evict: float = 0.0
    corrupt: float = 0.0
    refuse: float = 0.0
    delay_ms: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Faults:
        """``"lose=0.01,corrupt=0.5,seed=3"``; raises :class:`InvalidArgument` naming the part."""
        known = {field.name for field in fields(cls)}
        values: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, equals, value = part.partition("=")
            try:
                number = float(value)
            except ValueError:
                raise InvalidArgument(f"fault {part!r}: {value!r} is not a number") from None
            bound = 1.0 if name in ("lose", "evict", "corrupt", "refuse") else float("inf")
            if not equals or name not in known or not 0 <= number <= bound:
                raise InvalidArgument(f"fault {part!r}: expected name=value with a name of {sorted(known)}")
            values[name] = number
        seed = int(values.pop("seed", 0))
        return cls(**values, seed=seed)


class FaultyTransport:
    """Wraps a transport; its peers fail as ``faults`` say."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults
        self.name = f"{inner.name}+faults"

    def reaches(self, endpoint: Endpoint) -> bool:
        return self.inner.reaches(endpoint)

    def connect(self, endpoint: Endpoint) -> FaultyPeer:
        return FaultyPeer(self.inner.connect(endpoint), self.faults)

    def register(self, region: Region) -> None:
        self.inner.register(region)

    def unregister(self, region: Region) -> None:
        self.inner.unregister(region)

    def close(self) -> None:
        self.inner.close()


class FaultyPeer(PeerInFront):
    """Wraps a peer."""

    def __init__(self, inner: Peer, faults: Faults) -> None:
        super().__init__(inner)
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._lock = threading.Lock()
        if faults.corrupt:
            if not hasattr(inner, "tamper"):
                raise InvalidArgument(f"the {inner.transport} transport has no place to corrupt bytes")
            inner.tamper = self._tamper

    @property
    def transport(self) -> str:
        return f"{self.inner.transport}+faults"

    def fetch(self, request: Fetch) -> Fetched:
        self._delay(request.deadline)
        if self._faults.corrupt:
            request = replace(request, verify="always")
        fetched = self.inner.fetch(request)
        status = fetched.status.copy()
        self._strike(status, BlockStatus.LOADED, self._faults.lose, BlockStatus.NODE_LOST)
        self._strike(status, BlockStatus.LOADED, self._faults.evict, BlockStatus.EVICTED)
        return replace(fetched, status=status)

    def push(self, request: Push) -> Pushed:
        self._delay(request.deadline)
        hit = self._draw(len(request.blocks), self._faults.refuse)
        if not hit.any():
            return self.inner.push(request)
        kept = np.flatnonzero(~hit)
        status = np.full(len(hit), BlockStatus.REFUSED, np.uint8)
        if not len(kept):
            return Pushed(status)
        width = request.namespace.hash_bytes
        hashes = b"".join(request.hashes[i * width : (i + 1) * width] for i in kept.tolist())
        pushed = self.inner.push(replace(request, hashes=hashes, blocks=request.blocks[kept]))
        status[kept] = pushed.status
        durable = None
        if pushed.durable is not None:
            durable = np.zeros(len(hit), bool)
            durable[kept] = pushed.durable
        return replace(pushed, status=status, durable=durable)

    def _draw(self, count: int, rate: float) -> npt.NDArray[np.bool_]:
        with self._lock:
            return (
                np.array([self._random.random() < rate for _ in range(count)], bool) if rate else np.zeros(count, bool)
            )

    def _strike(self, status: StatusArray, was: BlockStatus, rate: float, becomes: BlockStatus) -> None:
        status[(status == was) & self._draw(len(status), rate)] = becomes

    def _tamper(self, blocks: BlockView, index: int) -> None:
        if self._draw(1, self._faults.corrupt)[0]:
            start, length = blocks.table[index, 0].tolist()
            blocks.region.bytes[start + self._random.randrange(length)] ^= 1 << self._random.randrange(8)

    def _delay(self, deadline: float) -> None:
        if self._faults.delay_ms:
            time.sleep(max(0.0, min(self._faults.delay_ms / 1e3, deadline - time.monotonic())))

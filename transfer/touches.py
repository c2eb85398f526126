"""Reads of a node's blocks that it has not heard of: what a client read by the shared index, until it says so."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import HASHES_MAX
from kvstrata.proto.wire import REPEATS_MAX

#: With so many hashes waiting they are told at once.
HASHES_WAITING_MAX: Final = 1 << 14

#: So many messages at most wait for a connection; the oldest go first.
KEPT_MAX: Final = 16

#: Handle, salt, weight epoch, bytes of a hash.
_Tenant = tuple[int, str, int, int]


class Touches:
    """By tenant, each read once, in the order of its latest time, with how often it was done. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: dict[_Tenant, dict[bytes, int]] = {}
        self._hashes = 0
        self._kept: list[pb.Touched] = []

    def __bool__(self) -> bool:
        return bool(self._reads or self._kept)

    def add(self, handle: int, salt: str, epoch: int, hashes: bytes, width: int) -> bool:
        """A read of these blocks, in order. True when it is time to :meth:`take`."""
        tenant = (handle, salt, epoch, width)
        with self._lock:
            reads = self._reads.get(tenant)
            if reads is None:
                reads = self._reads[tenant] = {}
            times = reads.pop(hashes, 0)
            reads[hashes] = min(times + 1, REPEATS_MAX)
            if not times:
                self._hashes += len(hashes) // width
            return self._hashes > HASHES_WAITING_MAX

    def take(self) -> list[pb.Touched]:
        """All of it, to be told; it is forgotten here."""
        with self._lock:
            reads, self._reads, self._hashes = self._reads, {}, 0
            kept, self._kept = self._kept, []
        return kept + [message for tenant, of in reads.items() for message in _messages(tenant, of)]

    def keep(self, messages: list[pb.Touched]) -> None:
        """What was taken and could not be told yet: it is taken again, up to ``KEPT_MAX`` of the latest."""
        with self._lock:
            self._kept = (self._kept + messages)[-KEPT_MAX:]


def _messages(tenant: _Tenant, reads: dict[bytes, int]) -> Iterator[pb.Touched]:
    """Each of at most ``HASHES_MAX`` hashes, as many as a read can have."""
    width = tenant[-1]
    part, waiting = dict[bytes, int](), 0
    for hashes, times in reads.items():
        count = len(hashes) // width
        if waiting + count > HASHES_MAX:
            yield _message(tenant, part)
            part, waiting = {}, 0
        part[hashes] = times
        waiting += count
    yield _message(tenant, part)


def _message(tenant: _Tenant, reads: dict[bytes, int]) -> pb.Touched:
    handle, salt, epoch, width = tenant
    calls = array("I", [len(hashes) // width for hashes in reads])
    times = array("I", reads.values())
    return pb.Touched(
        ns=handle, salt=salt, epoch=epoch, hashes=b"".join(reads), calls=calls.tobytes(), times=times.tobytes()
    )

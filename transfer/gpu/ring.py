"""The pinned memory between a device and the host: a few chunks that node, transports and device all reach."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata.proto.errors import Busy, Closed, KVError, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.base import Landing
from kvstrata.transfer.gpu.runtime import Pinned, Runtime
from kvstrata.transfer.regions import Region

log = get_logger(__name__)

CHUNK_BYTES: Final = 16 << 20
#: Chunks of one device that are in use or free, at most. A call uses two at a time.
CHUNKS: Final = 4
#: Chunks beside them, at most, that a transfer which came late may still touch.
HELD_MAX: Final = 8
#: How often a caller that waits for a chunk looks whether one that was held has settled.
LOOK_S: Final = 0.01

_abandoned: list[tuple[Chunk, tuple[Landing, ...]]] = []


class Chunk:
    """Pinned memory, registered as ``region`` with the client's transports."""

    def __init__(self, pinned: Pinned) -> None:
        self.pinned = pinned
        self.region = Region(pinned.bytes, pinned, os.dup(pinned.memfd) if pinned.memfd >= 0 else -1)

    @property
    def nbytes(self) -> int:
        return self.region.nbytes


class Ring:
    """Thread-safe. ``register``, ``unregister``: of the client's transports.

    A chunk is free, in use by one call, held (a transfer that its call could not wait for has not settled), or lost
    (the device failed over it: it is not used any more).
    """

    def __init__(
        self,
        runtime: Runtime,
        register: Callable[[Region], None],
        unregister: Callable[[Region], None],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        chunks: int = CHUNKS,
        held_max: int = HELD_MAX,
    ) -> None:
        self.runtime = runtime
        self.chunk_bytes = chunk_bytes
        self._register, self._unregister = register, unregister
        self._chunks, self._held_max = chunks, held_max
        self._free: list[Chunk] = []
        self._in_use = 0
        self._held: list[tuple[Chunk, tuple[Landing, ...]]] = []
        self._lost: list[Chunk] = []
        self._problem = ""
        self._failures = 0
        self._turn = threading.Condition()
        self._closed = False

    # ------------------------------------------------------------------ chunks

    def take(self, nbytes: int, deadline: float) -> Chunk:
        """A chunk of at least ``nbytes``, to be given back. The caller has no other one, or two could wait for each
        other. Raises :class:`Busy` at the ``deadline``, :class:`Unavailable` when there is no pinned memory to be had.
        """
        while True:
            chunk = self.try_take(nbytes)
            if chunk is not None:
                return chunk
            with self._turn:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Busy(f"all {self._chunks} staging chunks of {self._name} are in use")
                if not self._free:
                    self._turn.wait(min(left, LOOK_S))

    def try_take(self, nbytes: int) -> Chunk | None:
        """The same at once; None when there is none."""
        useless: list[Chunk] = []
        try:
            with self._turn:
                if self._closed:
                    raise Closed("the client is closed")
                self._reclaim(useless)
                if self._free:
                    chunk = self._free.pop()
                    self._in_use += 1
                    if chunk.nbytes >= nbytes:
                        return chunk
                    useless.append(chunk)
                elif not self._may_grow():
                    return None
                else:
                    self._in_use += 1
        finally:
            for chunk in useless:
                self._end(chunk)
        return self._made(max(nbytes, self.chunk_bytes))

    def give_back(self, chunk: Chunk, pending: Sequence[Landing] = ()) -> None:
        """It is free again once all of ``pending`` have settled."""
        with self._turn:
            self._in_use -= 1
            unsettled = tuple(each for each in pending if not each.settled())
            keep = not self._closed and self._in_use + len(self._free) < self._chunks
            if unsettled:
                self._hold(chunk, unsettled)
            elif keep:
                self._free.append(chunk)
            self._turn.notify()
        if not unsettled and not keep:
            self._end(chunk)

    def lose(self, chunk: Chunk) -> None:
        """The device failed over it, and may do anything with it: it is kept, and not used any more."""
        with self._turn:
            self._in_use -= 1
            self._lost.append(chunk)
            self._turn.notify()

    def failed(self, problem: str) -> None:
        """Shown in health until a call that went well. One log line for each problem, not for each failure."""
        with self._turn:
            new, self._problem = problem != self._problem, problem
            self._failures += 1
        if new:
            log.error("staging failed", device=self._name, reason=problem)

    def succeeded(self) -> None:
        """At least one copy of a call has ended, and none failed."""
        if self._problem:
            self._problem = ""

    # ------------------------------------------------------------------ what it says of itself

    def problem(self) -> str:
        """Why device memory cannot be reached, or an empty string."""
        return f"device {self._name}: {self._problem}" if self._problem else ""

    def health(self) -> dict[str, object]:
        """Plain values for JSON."""
        with self._turn:
            chunks = [*self._free, *(chunk for chunk, _ in self._held), *self._lost]
            return {
                "chunk_bytes": self.chunk_bytes,
                "free": len(self._free),
                "in_use": self._in_use,
                "held": len(self._held),
                "lost": len(self._lost),
                "idle_bytes": sum(chunk.nbytes for chunk in chunks),
                "failures": self._failures,
                "problem": self._problem,
            }

    def close(self) -> None:
        """After the transports' end. Free chunks go at once, those in use when they are given back; what may still be
        touched stays mapped."""
        with self._turn:
            self._closed = True
            free, self._free = self._free, []
            held, self._held = self._held, []
            self._turn.notify_all()
        for chunk in free:
            self._end(chunk)
        for chunk, pending in held:
            if all(each.settled() for each in pending):
                self._end(chunk)
            else:
                self._abandon(chunk, pending)

    # ------------------------------------------------------------------ inside

    @property
    def _name(self) -> str:
        return self.runtime.memory.spelled() or "host"

    def _may_grow(self) -> bool:
        if len(self._lost) >= self._chunks:
            raise Unavailable(f"all staging chunks of {self._name} were lost to its errors: start the process again")
        return self._in_use < self._chunks and self._in_use + len(self._held) < self._chunks + self._held_max

    def _made(self, nbytes: int) -> Chunk:
        """A new chunk, which is counted already."""
        try:
            chunk = Chunk(self.runtime.pinned(nbytes))
            self._register(chunk.region)
        except BaseException:
            with self._turn:
                self._in_use -= 1
                self._turn.notify()
            raise
        return chunk

    def _hold(self, chunk: Chunk, pending: tuple[Landing, ...]) -> None:
        if self._closed:
            self._abandon(chunk, pending)
        else:
            self._held.append((chunk, pending))

    def _reclaim(self, useless: list[Chunk]) -> None:
        """What has settled is free again, or ``useless`` where there are enough; the lock is held."""
        settled = [entry for entry in self._held if all(each.settled() for each in entry[1])]
        for entry in settled:
            self._held.remove(entry)
            if self._in_use + len(self._free) < self._chunks:
                self._free.append(entry[0])
            else:
                useless.append(entry[0])

    def _abandon(self, chunk: Chunk, pending: tuple[Landing, ...]) -> None:
        log.error("staging memory is left behind: a transfer that names it has not settled", device=self._name)
        _abandoned.append((chunk, pending))

    def _end(self, chunk: Chunk) -> None:
        if not self._closed:  # else the transports have ended, and nodes forget regions with the session
            try:
                self._unregister(chunk.region)
            except KVError as error:
                log.warning("staging memory not unregistered", reason=f"{type(error).__name__}: {error}")
        chunk.region.close()
        chunk.pinned.close()

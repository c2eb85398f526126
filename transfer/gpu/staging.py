"""Device memory over any transport: what a peer cannot reach by itself goes through a pinned ring.

::

    host region    --> the transport's peer, untouched
    device region  --> the transport's peer, where it reaches that memory and the pieces are large
                   --> ring of pinned chunks (host regions to the transport) <-- gather, scatter --> device
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstrata.proto.errors import Closed, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import (
    Fetch,
    Fetched,
    Peer,
    Push,
    Pushed,
    ReachesMemory,
    StatusArray,
)
from kvstrata.transfer.gpu.ring import CHUNK_BYTES, CHUNKS, HELD_MAX, Ring
from kvstrata.transfer.gpu.runtime import Event, Runtime
from kvstrata.transfer.gpu.runtimes import runtime_of
from kvstrata.transfer.gpu.staged_fetch import StagedFetch
from kvstrata.transfer.gpu.staged_push import StagedPush
from kvstrata.transfer.in_front import PeerInFront
from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.regions import BlockView, Region

log = get_logger(__name__)

#: Smaller pieces of device memory are staged even where they could be reached directly: each costs a descriptor.
DIRECT_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class StagingOptions:
    """``chunk_bytes`` of pinned memory, at most ``chunks`` of them a device, and ``held_max`` more that late transfers
    keep. ``direct_bytes``: pieces from this size on need no staging where a transport reaches the device."""

    chunk_bytes: int = CHUNK_BYTES
    chunks: int = CHUNKS
    held_max: int = HELD_MAX
    direct_bytes: int = DIRECT_BYTES


class Unmarked:
    """In the place of a mark that could not be made: nothing may come after it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def done(self) -> bool:
        raise Unavailable(self.reason)

    def wait(self, timeout_s: float) -> bool:
        raise Unavailable(self.reason)


class Staging:
    """A client's rings, one a device, made when its first memory is registered. Thread-safe.

    ``register``, ``unregister``: of the client's transports, for chunks.
    """

    def __init__(
        self,
        register: Callable[[Region], None],
        unregister: Callable[[Region], None],
        options: StagingOptions = StagingOptions(),
        runtime_of: Callable[[Memory], Runtime] = runtime_of,
    ) -> None:
        self.options = options
        self._register, self._unregister, self._runtime_of = register, unregister, runtime_of
        self._rings: dict[Memory, Ring] = {}
        self._lock = threading.Lock()
        self._closed = False

    def ring(self, memory: Memory) -> Ring:
        """Raises :class:`Unavailable` when there is no way to the device, saying what is missing."""
        ring = self._rings.get(memory)
        if ring is None:
            with self._lock:
                if self._closed:
                    raise Closed("the client is closed")
                ring = self._rings.get(memory)
                if ring is None:
                    ring = self._rings[memory] = self._new(memory)
        return ring

    def _new(self, memory: Memory) -> Ring:
        options = self.options
        return Ring(
            self._runtime_of(memory),
            self._register,
            self._unregister,
            chunk_bytes=options.chunk_bytes,
            chunks=options.chunks,
            held_max=options.held_max,
        )

    def mark(self, memory: Memory) -> Event:
        """What the calling thread's current stream has queued by now, for blocks of a call that others carry out.

        Where there is no way to the device, an :class:`Unmarked`: the blocks are refused, and the call goes on.
        """
        try:
            ring = self.ring(memory)
        except Unavailable as error:
            return Unmarked(str(error))
        try:
            return ring.runtime.mark()
        except Unavailable as error:
            ring.failed(str(error))
            return Unmarked(str(error))

    def health(self) -> dict[str, dict[str, object]]:
        """By device, as in "cuda:0"; see :meth:`Ring.health`."""
        return {memory.spelled(): ring.health() for memory, ring in list(self._rings.items())}

    def problems(self) -> list[str]:
        return [problem for ring in list(self._rings.values()) if (problem := ring.problem())]

    def close(self) -> None:
        """See :meth:`Ring.close`. Safe twice."""
        with self._lock:
            self._closed = True
            rings, self._rings = list(self._rings.values()), {}
        for ring in rings:
            ring.close()


class StagedPeer(PeerInFront):
    """A peer whose ``fetch`` and ``push`` take device memory too."""

    def __init__(self, inner: Peer, staging: Staging) -> None:
        super().__init__(inner)
        self._staging = staging
        self._reaches = inner.reaches_memory if isinstance(inner, ReachesMemory) else None

    def fetch(self, request: Fetch) -> Fetched:
        blocks = request.blocks
        memory = blocks.region.memory
        if memory is HOST or memory.on_host:
            return self.inner.fetch(request)
        try:
            ring = self._ring(blocks)
        except Unavailable as error:
            return _unfetched(_refused(blocks, error))
        if request.verify == "always" or not self._direct(blocks):  # a checksum needs bytes on the host
            return StagedFetch(self.inner, ring, request).run()
        unready = _unready(ring, blocks, request.deadline)
        if unready is not None:
            return _unfetched(unready)
        try:
            return self.inner.fetch(request)
        except Unavailable as error:
            log.debug("staged: the way to device memory was lost", node=self.endpoint.node_id, reason=str(error))
        return StagedFetch(self.inner, ring, request).run()

    def push(self, request: Push) -> Pushed:
        blocks = request.blocks
        memory = blocks.region.memory
        if memory is HOST or memory.on_host:
            return self.inner.push(request)
        try:
            ring = self._ring(blocks)
        except Unavailable as error:
            return Pushed(_refused(blocks, error))
        if not self._direct(blocks):
            return StagedPush(self.inner, ring, request).run()
        unready = _unready(ring, blocks, request.deadline)
        if unready is not None:
            return Pushed(unready)
        try:
            return self.inner.push(request)
        except Unavailable as error:
            log.debug("staged: the way to device memory was lost", node=self.endpoint.node_id, reason=str(error))
        return StagedPush(self.inner, ring, request).run()

    def _ring(self, blocks: BlockView) -> Ring:
        if isinstance(blocks.after, Unmarked):
            raise Unavailable(blocks.after.reason)
        return self._staging.ring(blocks.region.memory)

    def _direct(self, blocks: BlockView) -> bool:
        """Whether the transport's own way to the device is there, and the better one."""
        large = blocks.block_bytes >= blocks.pieces * self._staging.options.direct_bytes
        return large and self._reaches is not None and self._reaches(blocks.region)


def _unready(ring: Ring, blocks: BlockView, deadline: float) -> StatusArray | None:
    """Wait for what the blocks come after, which no transport knows of. None: it is reached; else their statuses."""
    try:
        mark = blocks.after if blocks.after is not None else ring.runtime.mark()
        if mark.wait(max(0.0, deadline - time.monotonic())):
            return None
    except Unavailable as error:
        ring.failed(str(error))
        return np.full(len(blocks), BlockStatus.REFUSED, np.uint8)
    return np.full(len(blocks), BlockStatus.LATE, np.uint8)


def _refused(blocks: BlockView, error: Unavailable) -> StatusArray:
    log.error("device memory out of reach", device=blocks.region.memory.spelled(), reason=str(error))
    return np.full(len(blocks), BlockStatus.REFUSED, np.uint8)


def _unfetched(status: StatusArray) -> Fetched:
    return Fetched(status, np.zeros(len(status), np.uint8))

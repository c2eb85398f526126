"""All-reduce between the rank processes of one engine: shared memory for the numbers, sockets for the meetings.

::

    memfd:   progress of each rank | buffer A: one slot a rank | buffer B: one slot a rank
    one operation:
        write own numbers into own slot of A -> tell every other rank, hear from every other -> add all slots of A
    the next one uses B: who is told of it by all knows that all have done with A.

The executor makes a :class:`RankGroup`, hands each rank its ends by inheritance, and drops its own, so that the
end of a rank is an end of file at every other.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.paged.model.rows import F32
from kvstrata.proto.errors import Unavailable

#: Bytes of a slot; larger arrays go in pieces.
SLOT_BYTES: Final = 1 << 20
#: How long a rank waits for another one to come to a meeting.
WAIT_S: Final = 120.0
_HEADER_BYTES: Final = 1 << 12
_COUNTER_STRIDE: Final = 64  # a cache line each
_MEETING: Final = struct.Struct("<QQ")  # number of the operation, elements in it


def _memory_bytes(size: int) -> int:
    return _HEADER_BYTES + 2 * size * SLOT_BYTES


class _Memory:
    """The shared memory, mapped: ``progress`` u64 [size], ``buffers`` float32 [2, size, elements]."""

    def __init__(self, fd: int, size: int) -> None:
        shared = mmap.mmap(fd, _memory_bytes(size))
        counters = np.frombuffer(shared, np.uint64, _HEADER_BYTES // 8)
        self.progress: npt.NDArray[np.uint64] = counters[:: _COUNTER_STRIDE // 8][:size]
        self.buffers: F32 = np.frombuffer(shared, np.float32, offset=_HEADER_BYTES).reshape(2, size, -1)

    def unmap(self) -> None:
        """Let go of the arrays: they keep the map alive, and it goes with the last piece of them that is in use."""
        self.progress = self.progress[:0].copy()
        self.buffers = self.buffers[:0].copy()


class RankGroup:
    """The executor's side: makes the memory and a socket for each pair of ranks. At most 64 ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Sparse: what no operation has touched costs nothing.
        self.memory_fd = os.memfd_create("kvstrata-collective", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.memory_fd, _memory_bytes(size))
        fcntl.fcntl(self.memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._memory = _Memory(self.memory_fd, size)
        self._ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for low in range(size):
            for high in range(low + 1, size):
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._ends[low][high], self._ends[high][low] = pair

    def peer_fds(self, rank: int) -> dict[int, int]:
        """What the rank's process must inherit, beside ``memory_fd``: a socket for each other rank."""
        return {other: end.fileno() for other, end in self._ends[rank].items()}

    def progress(self) -> list[int]:
        """Meetings that each rank has come to."""
        return [int(count) for count in self._memory.progress]

    def drop(self) -> None:
        """All ranks have their ends: close these. Progress can still be read. Idempotent."""
        for ends in self._ends:
            for end in ends.values():
                end.close()
            ends.clear()
        if self.memory_fd >= 0:
            os.close(self.memory_fd)
            self.memory_fd = -1

    def close(self) -> None:
        """Also the memory: progress cannot be read any more. Idempotent."""
        self.drop()
        self._memory.unmap()


class SharedCollective:
    """A rank's side; implements ``Collective``. Takes the descriptors over. For one thread.

    A rank that ends, or does not come to a meeting within ``wait_s``, makes every operation of the others raise
    :class:`Unavailable` with its name; so does one that brings an array of another size (a defect).
    """

    def __init__(
        self, rank: int, size: int, memory_fd: int, peer_fds: Mapping[int, int], *, wait_s: float = WAIT_S
    ) -> None:
        self.rank = rank
        self.size = size
        self._memory = _Memory(memory_fd, size)
        os.close(memory_fd)
        self._meetings = 0
        self._peers = {other: socket.socket(fileno=fd) for other, fd in sorted(peer_fds.items())}
        self._wait_s = wait_s
        for peer in self._peers.values():
            # The kernel keeps the time: one system call a message, where a timeout of Python's takes two.
            peer.setblocking(True)
            whole, part = divmod(wait_s, 1.0)
            limit = struct.pack("@ll", int(whole), int(part * 1e6))
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def all_reduce(self, array: F32) -> F32:
        """Sum over ranks, added in the order of ranks. float32 of any shape, the same on all ranks.

        The sum is put into ``array`` where that is writable and contiguous: new memory costs more than adding.
        """
        numbers = np.require(array, np.float32, ["C", "W"]).reshape(-1)
        step = SLOT_BYTES // numbers.itemsize
        for start in range(0, len(numbers), step):
            self._reduce(numbers[start : start + step])
        return numbers.reshape(array.shape)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._memory.unmap()

    def _reduce(self, numbers: F32) -> None:
        slots = self._memory.buffers[self._meetings % 2, :, : len(numbers)]
        slots[self.rank] = numbers
        self._meet(len(numbers))
        np.copyto(numbers, slots[0])
        for other in slots[1:]:
            numbers += other

    def _meet(self, elements: int) -> None:
        """Return when every rank has come; what they wrote before is visible then."""
        self._meetings += 1
        self._memory.progress[self.rank] = self._meetings
        word = _MEETING.pack(self._meetings, elements)
        for other, peer in self._peers.items():
            try:
                peer.send(word)
            except OSError as error:
                raise Unavailable(f"rank {other} is lost: {error.strerror}") from error
        for other, peer in self._peers.items():
            self._hear(other, peer, word)

    def _hear(self, other: int, peer: socket.socket, expected: bytes) -> None:
        try:
            word = peer.recv(_MEETING.size)
        except BlockingIOError as error:
            raise Unavailable(f"rank {other} did not come within {self._wait_s:g} s") from error
        except OSError as error:
            raise Unavailable(f"rank {other} is lost: {error.strerror}") from error
        if not word:
            raise Unavailable(f"rank {other} is lost: it ended")
        if word != expected:
            theirs, ours = _MEETING.unpack(word), _MEETING.unpack(expected)
            raise Unavailable(f"rank {other} is at operation {theirs[0]} of {theirs[1]} numbers, expected {ours}")

"""Memory of a node's shared index: a memfd that clients on its host may map read-only, or of the process alone."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Protocol

from kvstrata.storage.slab import SEALS


class IndexMemory(Protocol):
    """Zeroed memory of the index. ``share_fd`` is -1 where it cannot be handed out."""

    view: memoryview
    share_fd: int
    nbytes: int

    def close(self) -> None: ...


class PrivateMemory:
    """Of this process alone: for state that no client maps."""

    share_fd = -1

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._mapping = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._mapping)

    def close(self) -> None:
        self.view.release()
        self._mapping.close()


class SharedMemory:
    """A memfd, sealed once the node has mapped it. Its pages come as they are first used. Raises :class:`OSError`."""

    def __init__(self, nbytes: int) -> None:
        self.fd = self.share_fd = -1
        try:
            self.fd = os.memfd_create("kvstrata-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, nbytes)
            self._mapping = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.share_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._close_fds()
            raise
        self.nbytes = nbytes
        self.view = memoryview(self._mapping)

    def _close_fds(self) -> None:
        for fd in (self.fd, self.share_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.share_fd = -1

    def close(self) -> None:
        """Give the descriptors back, and the memory once nobody holds a view of it. Safe twice."""
        self._close_fds()
        with contextlib.suppress(BufferError):  # a reply still being sent holds it; it goes with the reply
            self.view.release()
            self._mapping.close()

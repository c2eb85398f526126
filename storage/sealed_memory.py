"""Memory that a node writes and clients on its host may map read-only: a memfd, sealed once the node has mapped it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

from kvstrata.storage.slab import SEALS


class SealedMemory:
    """``nbytes`` of zeros, whose pages come as they are first used: ``view`` is the node's own map, ``share_fd`` is what
    is handed out. Raises :class:`OSError`."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.fd = self.share_fd = -1
        try:
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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

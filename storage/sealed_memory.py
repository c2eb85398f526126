"""Memory that a node writes and clients on its host may map read-only: a memfd, sealed once the node has mapped it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Final

from kvstrata.storage.huge_pages import Pages, populate_transparent

#: After this seal nobody can map the memory writable any more; maps made before keep working.
F_SEAL_FUTURE_WRITE: Final = 0x0010
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class SealedMemory:
    """``nbytes`` of zeros: ``view`` is the node's own map, ``share_fd`` is what is handed out. Raises :class:`OSError`.

    ``populate``: all pages are there at once; else they come as they are first used.
    """

    def __init__(self, name: str, nbytes: int, *, pages: Pages = Pages.SMALL, populate: bool = True) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if pages is Pages.RESERVED:
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
        at_once = mmap.MAP_POPULATE if populate and pages is not Pages.TRANSPARENT else 0
        self.fd = self.share_fd = -1
        try:
            self.fd = os.memfd_create(name, flags)
            os.ftruncate(self.fd, nbytes)
            self._mapping = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED | at_once)
            if populate and pages is Pages.TRANSPARENT:
                populate_transparent(self._mapping)
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

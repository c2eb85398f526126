"""Memory of a node's shared index: a memfd that clients on its host may map read-only, or of the process alone."""

from __future__ import annotations

import mmap
from typing import Protocol

from kvstrata.storage.sealed_memory import SealedMemory


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


def shared_memory(nbytes: int) -> SealedMemory:
    """Of a memfd that clients map. Its pages come as they are first used. Raises :class:`OSError`."""
    return SealedMemory("kvstrata-index", nbytes, populate=False)

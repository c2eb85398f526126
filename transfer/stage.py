"""Stores from memory that a node can neither map nor read: through a memfd of ours, a part at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.base import Mask, Push, StatusArray
from kvstrata.transfer.copier import copy_between
from kvstrata.transfer.regions import Region, shareable

if TYPE_CHECKING:
    from kvstrata.transfer.shm import ShmPeer

STAGE_BYTES: Final = 32 << 20


class Stage:
    """A memfd the node can map, for stores from memory it can reach in no other way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: Region | None = None

    def push(self, peer: ShmPeer, request: Push, status: StatusArray, durable: Mask) -> None:
        """Copy to the stage and let the node pull, a stageful at a time."""
        block_bytes = request.namespace.block_bytes
        hash_bytes = request.namespace.hash_bytes
        with self._lock:
            region = self._ready(max(STAGE_BYTES, block_bytes))
            if not peer.method(region):
                raise Unavailable("the node can map no memory of this process: use the tcp transport")
            rows = region.rows(request.namespace)
            step = len(rows)
            for start in range(0, len(status), step):
                part = request.blocks[start : start + step]
                target = rows[: len(part)]
                copy_between(target, part)
                before = request.hashes[(start - 1) * hash_bytes : start * hash_bytes]
                staged = Push(
                    namespace=request.namespace,
                    salt=request.salt,
                    hashes=request.hashes[start * hash_bytes : (start + len(part)) * hash_bytes],
                    blocks=target,
                    deadline=request.deadline,
                    parent=before if start else request.parent,
                    first_index=request.first_index + start,
                    epoch=request.epoch,
                )
                mine = slice(start, start + len(part))
                peer.pull(staged, status[mine], durable[mine])

    def _ready(self, nbytes: int) -> Region:
        if self._region is None or self._region.nbytes < nbytes:
            flat, mapping, fd = shareable(nbytes, "kvstrata-stage")
            self._region = Region(flat, mapping, fd)
        return self._region

    def close(self) -> None:
        with self._lock:
            if self._region is not None:
                self._region.close()
            self._region = None

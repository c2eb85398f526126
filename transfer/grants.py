"""Where blocks lie that a client copies itself, and the answer to an acquire, as arrays over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ProtocolError
from kvstrata.proto.status import SLOT_ROW, BlockStatus
from kvstrata.transfer.replies import elements, statuses
from kvstrata.transfer.slabs import Slab

_LOADED = int(BlockStatus.LOADED)

#: :data:`SLOT_ROW` as numpy reads it.
ROW: Final = np.dtype([("slab", "<u4"), ("slot", "<u4"), ("offset", "<u8"), ("generation", "<u8"), ("checksum", "<u8")])
assert ROW.itemsize == SLOT_ROW.size

#: Taken off every lease before it is believed: clocks are read at different moments.
LEASE_MARGIN_S: Final = 0.005


class Places:
    """Where some blocks lie in a node's slabs. All arrays run over the blocks."""

    __slots__ = ("_by_slab", "count", "generation", "offset", "slab", "slot")

    def __init__(self, rows: npt.NDArray[np.void]) -> None:
        """``rows`` has the fields of :data:`ROW`."""
        self.count = len(rows)
        self._by_slab: list[tuple[int, slice | npt.NDArray[np.int64]]] | None = None
        self.slab, self.slot = rows["slab"], rows["slot"]
        self.offset, self.generation = rows["offset"], rows["generation"]

    def addresses(self, slabs: Mapping[int, Slab], block_bytes: int) -> npt.NDArray[np.int64]:
        """Where each block lies in this process, i64[count]; raises :class:`ProtocolError` if one does not."""
        offset = self.offset.astype(np.int64)
        for index, here in self.by_slab():
            slab = slabs[index]
            slab.check(int(self.slot[here].max()), int(self.offset[here].max()), block_bytes)
            offset[here] += slab.address
        return offset

    def by_slab(self) -> list[tuple[int, slice | npt.NDArray[np.int64]]]:
        """(slab, which of the blocks lie in it), of each slab once."""
        if self._by_slab is None:
            slab = self.slab
            if not self.count:
                self._by_slab = []
            elif (slab == slab[0]).all():
                self._by_slab = [(int(slab[0]), slice(None))]
            else:
                self._by_slab = [(index, np.flatnonzero(slab == index)) for index in np.unique(slab).tolist()]
        return self._by_slab

    def changed(self, slabs: Callable[[int], Slab]) -> list[int]:
        """Which of the blocks, in no order, have lost their slots to others. All must be in their slabs."""
        changed: list[int] = []
        for index, here in self.by_slab():
            words = np.asarray(slabs(index).generations)
            other = np.flatnonzero(words[self.slot[here]] != self.generation[here])
            changed.extend((other if isinstance(here, slice) else here[other]).tolist())
        return changed


class Granted(Places):
    """``status`` u8[asked]; all other arrays run over the granted ``positions``.

    ``expires`` is in this process's monotonic seconds: the lease counted from before the request was
    sent, less a margin, so it never outlives the node's own view of it. Inline answers have no slots.
    """

    __slots__ = (
        "checksum", "delta_seq", "expires", "lease", "lease_s", "positions", "status", "tier",
    )  # fmt: skip

    def __init__(self, reply: pb.AcquireOk, sent: float, asked: int, *, inline: bool = False) -> None:
        self.status = statuses(reply.status, asked, BlockStatus.MISSING)
        self.positions = np.flatnonzero(self.status == _LOADED)
        self.tier = np.frombuffer(reply.tier, np.uint8)
        rows = elements(reply.rows, ROW)
        super().__init__(rows)
        self.count = len(self.positions)
        self.checksum = elements(reply.checksum, np.uint64) if inline else rows["checksum"]
        self.lease = reply.lease
        self.lease_s = reply.lease_ms / 1e3
        self.expires = sent + self.lease_s - LEASE_MARGIN_S
        self.delta_seq = reply.delta_seq
        if len(self.checksum) != self.count or len(self.tier) != self.count:
            raise ProtocolError(f"the node granted {self.count} blocks and described {len(self.checksum)}")

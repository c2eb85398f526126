"""Zero-copy views of blocks held by leases on one or more nodes of this host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from kvstrata.transfer.base import Lease

Block = npt.NDArray[np.uint8]


class View(Sequence["Block | None"]):
    """``view[i]`` is a read-only u8[block_bytes] over block i in the node's memory, or None where missing.

    The arrays are good until the ``with`` block of ``client.view`` ends, and while ``valid()`` is True:
    a node takes a view back past its age cap, or by dying. Check ``valid()`` after having used the bytes.
    """

    def __init__(self, count: int) -> None:
        self._arrays: list[Block | None] = [None] * count
        self._leases: list[Lease] = []
        self._closed = False

    def add(self, lease: Lease, positions: Sequence[int]) -> None:
        """Take over a lease whose arrays are the blocks at ``positions``."""
        self._leases.append(lease)
        for position, block in zip(positions, lease.arrays, strict=True):
            self._arrays[position] = block

    def valid(self) -> bool:
        return not self._closed and all(lease.valid() for lease in list(self._leases))

    def close(self) -> None:
        """Give the leases back; the arrays must not be read any more. Safe twice."""
        self._closed = True
        leases, self._leases = self._leases, []
        self._arrays = [None] * len(self._arrays)
        for lease in leases:
            lease.close()

    def __len__(self) -> int:
        return len(self._arrays)

    @overload
    def __getitem__(self, index: int) -> Block | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block | None]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block | None] | None:
        return self._arrays[index]

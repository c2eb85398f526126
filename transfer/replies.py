"""What a node's answers say of each block, checked: a node may be newer than this build, or broken."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import ProtocolError
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Mask, StatusArray

_KNOWN: Final = np.zeros(256, bool)
_KNOWN[[int(status) for status in BlockStatus if status is not BlockStatus.UNKNOWN]] = True


def statuses(packed: bytes, count: int, otherwise: BlockStatus) -> StatusArray:
    """u8[count], writable; a status that this build does not know is ``otherwise``.

    Raises :class:`ProtocolError` when there are more or fewer.
    """
    if len(packed) != count:
        raise ProtocolError(f"the node answered {len(packed)} statuses for {count} blocks")
    status = np.frombuffer(bytearray(packed), np.uint8)
    known = _KNOWN[status]
    if not known.all():
        status[~known] = otherwise
    return status


def flags(packed: bytes, count: int) -> Mask:
    """bool[count]; all False when the node says nothing. Raises like :func:`statuses`."""
    if not packed:
        return np.zeros(count, bool)
    if len(packed) != count:
        raise ProtocolError(f"the node answered {len(packed)} flags for {count} blocks")
    return np.frombuffer(packed, np.uint8).astype(bool)


def elements(packed: bytes, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of whole elements; raises :class:`ProtocolError` when a part of one is left over."""
    dtype = np.dtype(kind)
    if len(packed) % dtype.itemsize:
        raise ProtocolError(f"{len(packed)} bytes are no array of {dtype.itemsize}-byte elements")
    return np.frombuffer(packed, dtype)

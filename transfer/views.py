"""Zero-copy views: a read lease that is kept alive while its arrays are in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, Unavailable
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import expect
from kvstrata.transfer.grants import LEASE_MARGIN_S, Granted

if TYPE_CHECKING:
    from kvstrata.transfer.shm import ShmPeer

#: A view is renewed when this share of its lease is left.
RENEW_AT: Final = 0.5


class ShmLease:
    """A held view. ``valid()`` is False once the lease could have ended or a slot has changed."""

    def __init__(self, peer: ShmPeer, granted: Granted, arrays: Sequence[npt.NDArray[np.uint8] | None]) -> None:
        self.arrays = arrays
        self.status = granted.status
        self._peer = peer
        self._granted = granted
        self._expires = granted.expires
        self._lost = False
        self._lock = threading.Lock()

    def valid(self) -> bool:
        return not self._lost and time.monotonic() < self._expires and not self._peer.changed(self._granted)

    def renew_if_due(self) -> None:
        """Called by the peer's upkeep; the node refuses past the view's age cap."""
        granted = self._granted
        with self._lock:
            if self._lost or not granted.lease or self._expires - time.monotonic() > granted.lease_s * RENEW_AT:
                return
            sent = time.monotonic()
            message = pb.Renew(lease=granted.lease, lease_ms=int(granted.lease_s * 1e3)).SerializeToString()
            try:
                frame = self._peer.link.channel.call(Kind.RENEW, message, sent + granted.lease_s)
            except (Unavailable, Busy):
                return  # tried again until the lease has run out
            renewed_ms = expect(pb.RenewOk, frame, Kind.RENEW_OK).lease_ms
            self._lost = renewed_ms == 0
            self._expires = sent + renewed_ms / 1e3 - LEASE_MARGIN_S

    def close(self) -> None:
        """Give the lease back. The arrays must not be read any more. Safe twice."""
        with self._lock:
            if self._granted.lease and not self._lost:
                self._peer.link.give_back(self._granted.lease)
            self._lost = True
        self._peer.drop_view(self)

"""Gathers and scatters under way, and what has become of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.base import Landing
from kvstrata.transfer.gpu.ring import Chunk
from kvstrata.transfer.gpu.runtime import Event
from kvstrata.transfer.regions import Region

log = get_logger(__name__)


class DeviceFailed(Exception):
    """The device, or its driver, failed: no node is to blame, and none is asked again."""


def events_ended(events: Sequence[Event], deadline: float | None = None) -> bool:
    """Whether all are done, by ``deadline`` (monotonic seconds) or now. Raises :class:`DeviceFailed`."""
    try:
        if deadline is None:
            return all(event.done() for event in events)
        return all(event.wait(max(0.0, deadline - time.monotonic())) for event in events)
    except Unavailable as error:
        raise DeviceFailed(str(error)) from error


class CopyLanding:
    """A :class:`~kvstrata.transfer.base.Landing`: copies that a call did not wait for use its caller's memory, which
    this keeps alive."""

    def __init__(self, events: Sequence[Event], region: Region) -> None:
        self._events = tuple(events)
        self.region = region

    def settled(self) -> bool:
        return self._ended(None)

    def wait(self, deadline: float) -> bool:
        return self._ended(deadline)

    def _ended(self, deadline: float | None) -> bool:
        try:
            return events_ended(self._events, deadline)
        except DeviceFailed as error:
            log.warning("a copy failed after its call had ended", reason=str(error))
            return True  # a device that failed moves nothing any more


@dataclass(slots=True, eq=False)
class Flight:
    """Copies between a chunk and blocks ``rows`` of a call. ``pending``: what else may still touch the chunk."""

    chunk: Chunk
    rows: npt.NDArray[np.int64]
    events: list[Event] = field(default_factory=list)
    pending: tuple[Landing, ...] = ()

    def landing(self, region: Region) -> CopyLanding:
        """``region``: the caller's memory."""
        return CopyLanding(self.events, region)

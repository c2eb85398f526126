"""Reading ahead: a node begins to read a call's blocks from SSD before the client asks for their bytes."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstrata.client.asked import Asked
from kvstrata.client.plan import Part, Positions, positions_of
from kvstrata.proto.errors import KVError
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Peer

log = get_logger(__name__)

_IN_FLIGHT: Final = int(BlockStatus.IN_FLIGHT)
#: The node's read-ahead was full when these were asked for: they are asked for again.
_NO_ROOM: Final = int(BlockStatus.NO_ROOM)


class ReadAhead:
    """One node's blocks of one call, some on SSD (``waiting``: positions in the order they are fetched).

    :meth:`before` goes before each part is fetched. All are asked for at once, those in memory first, so that
    they count as used and do not make room for the others; those that the node's bound on reading ahead left out
    are asked for again as parts are fetched. It only ever saves time: a block that was not read ahead is read when
    it is fetched, so a node that refuses is not asked any more.
    """

    def __init__(self, asked: Asked, peer: Peer, waiting: Positions) -> None:
        self._asked = asked
        self._peer = peer
        self._waiting = waiting
        self._read: list[Positions] = []

    @property
    def from_ssd(self) -> Positions:
        """Positions whose bytes the node said it was reading."""
        return np.concatenate(self._read) if self._read else np.zeros(0, np.int64)

    def before(self, part: Part) -> None:
        waiting = self._waiting
        if not len(waiting):
            return
        now = waiting[: self._asked.limit]
        try:
            status = self._peer.prefetch(self._asked.named(now))
        except KVError as error:
            log.debug("not read ahead", node=self._peer.endpoint.node_id, reason=f"{type(error).__name__}: {error}")
            self._waiting = waiting[:0]
            return
        self._read.append(now[status == _IN_FLIGHT])
        left = np.concatenate((now[status == _NO_ROOM], waiting[len(now) :]))
        self._waiting = left[~np.isin(left, positions_of(part.where))]

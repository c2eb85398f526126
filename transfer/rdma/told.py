"""Which of a client's regions one node knows, and which it may still be reading after it was told to forget them."""

from __future__ import annotations

import time
from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, Unavailable
from kvstrata.proto.wire import Kind
from kvstrata.transfer.frames import Late
from kvstrata.transfer.link import NodeLink
from kvstrata.transfer.rdma.opening import Opened, register_region
from kvstrata.transfer.regions import Region

#: A node has this long to say that it reads a region no more.
UNREGISTER_S: Final = 1.0
#: While it has not, it is asked again so often.
ASK_AGAIN_S: Final = 1.0


class ToldRegions:
    """Thread-safe: single operations on sets and dicts. A region that is leaving stays alive here."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._told: tuple[Opened | None, set[int]] = (None, set())  # by the rails over which the node was told
        self._unanswered: set[int] = set()
        self._leaving: dict[int, Region] = {}
        self._ask_again_at = 0.0

    def tell(self, opened: Opened, region: Region, deadline: float) -> None:
        """The node knows the region from now on. Raises :class:`KVError`."""
        if self._told[0] is not opened:
            self._told = (opened, set())
        told = self._told[1]
        if region.id not in told:
            register_region(self._link, opened.agent.memory, region, deadline)
            told.add(region.id)

    def untold(self, region: Region) -> None:
        """The node says that it does not know it."""
        self._told[1].discard(region.id)

    def unanswered(self, region: Region) -> None:
        """A store out of it has ended without the node's word that it was read: it may be read later."""
        self._unanswered.add(region.id)

    def forget(self, region: Region) -> bool:
        """Have the node forget a region; False while it may still be reading it: :meth:`upkeep` asks again."""
        told = self._told[1]
        if region.id not in told and region.id not in self._unanswered:
            return True
        told.discard(region.id)
        if self._forgotten(region):
            return True
        self._leaving[region.id] = region
        return False

    def _forgotten(self, region: Region) -> bool:
        """The node has confirmed that it reads it no more, or cannot be reading it."""
        message = pb.UnregisterRegion(region=region.id).SerializeToString()
        try:
            self._link.channel.call(Kind.UNREGISTER_REGION, message, time.monotonic() + UNREGISTER_S)
        except (Unavailable, Busy) as error:
            return region.id not in self._unanswered and not isinstance(error, Late | Busy)
        self._unanswered.discard(region.id)
        return True

    def upkeep(self) -> None:
        """Ask again about those that are leaving."""
        now = time.monotonic()
        if self._leaving and self._link.channel.breaker.closed and now > self._ask_again_at:
            self._ask_again_at = now + ASK_AGAIN_S
            for region in list(self._leaving.values()):
                if self._forgotten(region):
                    del self._leaving[region.id]

    @property
    def leaving(self) -> int:
        return len(self._leaving)

"""Which of a client's regions one node knows, and which it may still be reading after it was told to forget them."""

from __future__ import annotations

import threading
import time
from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, Closed, KVError, Unavailable
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
    """Thread-safe. A region that is leaving stays alive here, and is held: see :class:`Holders`."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._told: tuple[Opened | None, set[int]] = (None, set())  # by the rails over which the node was told
        self._unanswered: set[int] = set()
        self._leaving: dict[int, Region] = {}
        self._telling: dict[int, threading.Lock] = {}  # one a region: its first store tells, others wait
        self._ask_again_at = 0.0

    def tell(self, opened: Opened, region: Region, deadline: float) -> None:
        """The node knows the region from now on.

        Raises :class:`KVError`: :class:`Closed` once it is unregistered, :class:`Busy` when another tells it for long.
        """
        told_over, told = self._told
        if told_over is opened and region.id in told:
            return
        region.check_open()
        telling = self._telling.setdefault(region.id, threading.Lock())
        if not telling.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Busy("the node was still being told of the region when the deadline passed")
        try:
            region.check_open()
            with self._lock:
                if self._told[0] is not opened:
                    self._told = (opened, set())
                told = self._told[1]
            if region.id not in told:
                register_region(self._link, opened.agent.memory, region, deadline)
                told.add(region.id)
        finally:
            telling.release()

    def untold(self, region: Region) -> None:
        """The node says that it does not know it."""
        self._told[1].discard(region.id)

    def unanswered(self, region: Region) -> None:
        """A store out of it has ended without the node's word that it was read: it may be read later."""
        self._unanswered.add(region.id)

    def forget(self, region: Region) -> bool:
        """Have the node forget a region, closed before; False while it may still be reading it: :meth:`upkeep` asks
        again."""
        telling = self._telling.setdefault(region.id, threading.Lock())
        idle = telling.acquire(timeout=UNREGISTER_S)
        if idle:
            telling.release()
            self._telling.pop(region.id, None)
        told = self._told[1]
        if idle and region.id not in told and region.id not in self._unanswered:
            return True
        told.discard(region.id)
        if self._forgotten(region) and idle:
            return True
        region.holders.add(self)
        self._leaving[region.id] = region
        return False

    def _forgotten(self, region: Region) -> bool:
        """The node has confirmed that it reads it no more, or cannot be reading it."""
        message = pb.UnregisterRegion(region=region.id).SerializeToString()
        try:
            self._link.channel.call(Kind.UNREGISTER_REGION, message, time.monotonic() + UNREGISTER_S)
        except (Unavailable, Closed) as error:  # it is gone, or never to be asked again: its last word counts
            return region.id not in self._unanswered and not isinstance(error, Late)
        except KVError:
            return False
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
                    region.holders.discard(self)

    @property
    def leaving(self) -> int:
        return len(self._leaving)

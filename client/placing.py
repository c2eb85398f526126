"""Where stores go. A master says so, and where a pool has one node it says so for a while: then blocks go there without
a question, and the master is told of them afterwards.

The node decides about every block either way: whether it has it, whether another writer is at it, whether the tenant
has room.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstrata.client.directory import Directory
from kvstrata.client.locations import Placed, filled
from kvstrata.client.namespace import PoolNamespace
from kvstrata.proto.errors import Busy, KVError, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import PlaceState
from kvstrata.transfer.base import Endpoint

log = get_logger(__name__)

#: Tenants of which it is known that there is one node.
TENANTS_MAX: Final = 64
#: Hashes of a tenant of which the master has not been told: with more it is asked, and told.
UNTOLD_MAX: Final = 1 << 14
#: What has waited for so long is told. The answer lets the tenant's stores go on.
TELL_AFTER_S: Final = 0.25
#: A master has so long to hear it.
TELL_S: Final = 0.25
CLOSE_S: Final = 0.1

_NEW: Final = int(PlaceState.NEW)
#: Everything at the first of the nodes that are named.
_FIRST: Final = 1


@dataclass(slots=True)
class _Sole:
    """The one node for a tenant's blocks until ``until``; ``untold`` is what went there since the master was asked."""

    nodes: tuple[Endpoint, ...]
    until: float = 0.0
    untold: list[bytes] = field(default_factory=list)
    blocks: int = 0
    since: float = 0.0  #: when the first of them went

    def take(self) -> bytes:
        """What went there, to be told."""
        told, self.untold, self.blocks = b"".join(self.untold), [], 0
        return told


#: Handle, its weight epoch, and salt.
_Tenant = tuple[PoolNamespace, int, str]


class Placer:
    """Asks the directory where stores go, as far as it has to be asked. Thread-safe. Times are monotonic seconds."""

    def __init__(self, directory: Directory, boot_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._boot_id = boot_id
        self._clock = clock
        self._lock = threading.Lock()
        self._soles: OrderedDict[_Tenant, _Sole] = OrderedDict()

    def place(
        self, namespace: PoolNamespace, salt: str, packed: bytes, deadline: float, avoid: Sequence[Endpoint] = ()
    ) -> Placed:
        """As :meth:`Directory.place`. Who has something to ``avoid`` always asks, and so does the next call after it:
        the one node is lost, or takes nothing."""
        tenant, count, untold = (namespace, namespace.epoch, salt), len(packed) // namespace.hash_bytes, b""
        with self._lock:
            sole = self._soles.get(tenant)
            if sole is not None:
                now = self._clock()
                if not avoid and now < sole.until and sole.blocks + count <= UNTOLD_MAX:
                    if not sole.untold:
                        sole.since = now
                    sole.untold.append(packed)
                    sole.blocks += count
                    return Placed(filled(count, _FIRST, np.uint16), filled(count, _NEW, np.uint8), sole.nodes, 1, _NEW)
                untold = sole.take()
        return self._ask(tenant, packed, deadline, avoid, untold)

    def _ask(self, tenant: _Tenant, packed: bytes, deadline: float, avoid: Sequence[Endpoint], untold: bytes) -> Placed:
        asked_at = self._clock()
        namespace, _, salt = tenant
        placed = self._directory.place(namespace, salt, packed, self._boot_id, deadline, avoid, untold)
        with self._lock:
            sole = self._soles.get(tenant)
            if placed.stands_s and not avoid:
                if sole is None:
                    sole = self._soles[tenant] = _Sole(placed.nodes)
                sole.nodes, sole.until = placed.nodes, asked_at + placed.stands_s
                if len(self._soles) > TENANTS_MAX:
                    self._soles.popitem(last=False)
            elif sole is not None:
                sole.until = 0.0
        return placed

    # ------------------------------------------------------------------ telling

    def upkeep(self) -> None:
        """Tell what is due. What a master does not hear now it is not told: of the blocks it learns from their node."""
        now = self._clock()
        with self._lock:
            for tenant in [each for each, sole in self._soles.items() if now >= sole.until and not sole.untold]:
                del self._soles[tenant]
            due = [each for each, sole in self._soles.items() if sole.untold and now - sole.since >= TELL_AFTER_S]
        self._tell(due, now + TELL_S)

    def _tell(self, tenants: Sequence[_Tenant], deadline: float) -> None:
        for tenant in tenants:
            with self._lock:
                sole = self._soles.get(tenant)
                untold = b"" if sole is None else sole.take()
            if not untold:
                continue
            try:
                self._ask(tenant, b"", deadline, (), untold)
            except KVError as error:
                log.debug("a master is not told of stores", reason=f"{type(error).__name__}: {error}")
                with self._lock:
                    if sole := self._soles.get(tenant):
                        sole.until = 0.0
                if isinstance(error, Unavailable | Busy):
                    return  # nor would it hear of the others

    def close(self) -> None:
        """Tell the rest."""
        with self._lock:
            rest = [tenant for tenant, sole in self._soles.items() if sole.untold]
        self._tell(rest, self._clock() + CLOSE_S)

"""Where stores go. A master says so, and where a pool has one node it says so for a while: then blocks go there without
a question, and the master is told of them afterwards.

The node decides about every block either way: whether it has it, whether another writer is at it, whether the tenant
has room.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstrata.client.directory import Directory
from kvstrata.client.locations import STANDS_MAX_S, Placed, filled
from kvstrata.client.namespace import PoolNamespace
from kvstrata.proto.errors import Busy, KVError, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import PlaceState
from kvstrata.transfer.base import Endpoint

log = get_logger(__name__)

#: Tenants of which it is known that there is one node. Those past it ask.
TENANTS_MAX: Final = 64
#: Hashes of a tenant of which the master has not been told: with more it is asked, and told.
UNTOLD_MAX: Final = 1 << 14
#: What has waited for so long is told. The answer lets the tenant's stores go on.
TELL_AFTER_S: Final = 0.25
#: A master has so long to hear it.
TELL_S: Final = 0.25
#: One that does not hear it in time is told nothing for so long.
PAUSE_S: Final = 1.0
CLOSE_S: Final = 0.1

_NEW: Final = int(PlaceState.NEW)
#: Everything at the first of the nodes that are named.
_FIRST: Final = 1


@dataclass(slots=True)
class _Sole:
    """The one node for a tenant's blocks until ``until``; ``untold`` is what went there since the master was asked."""

    node: Endpoint
    asked_at: float  #: when the question was put that this is the answer to; older ones say nothing
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
        self._soles: dict[_Tenant, _Sole] = {}
        self._tell_at = 0.0

    def place(
        self, namespace: PoolNamespace, salt: str, packed: bytes, deadline: float, avoid: Sequence[Endpoint] = ()
    ) -> Placed:
        """As :meth:`Directory.place`. Who wants to ``avoid`` the one node asks, and so does the next call after it: the
        node is lost, or takes nothing. A handle that no master has told its weight epoch asks, and learns it."""
        epoch = namespace.pin.epoch
        tenant, untold = None if epoch is None else (namespace, epoch, salt), b""
        with self._lock:
            sole = None if tenant is None else self._soles.get(tenant)
            if sole is not None:
                now, count = self._clock(), len(packed) // namespace.hash_bytes
                if avoid and _among(sole.node, avoid):
                    sole.until, sole.asked_at = 0.0, now
                elif now < sole.until and sole.blocks + count <= UNTOLD_MAX:
                    if not sole.untold:
                        sole.since = now
                    sole.untold.append(packed)
                    sole.blocks += count
                    codes, states = filled(count, _FIRST, np.uint16), filled(count, _NEW, np.uint8)
                    return Placed(codes, states, (sole.node,), _FIRST, _NEW)
                untold = sole.take()
        return self._ask(namespace, salt, packed, deadline, avoid, untold)

    def _ask(
        self,
        namespace: PoolNamespace,
        salt: str,
        packed: bytes,
        deadline: float,
        avoid: Sequence[Endpoint],
        untold: bytes,
    ) -> Placed:
        asked_at = self._clock()
        placed = self._directory.place(namespace, salt, packed, self._boot_id, deadline, avoid, untold)
        epoch = namespace.pin.epoch  # an answer has told it
        node = placed.nodes[0] if placed.stands_s and not (avoid and _among(placed.nodes[0], avoid)) else None
        if epoch is None:
            return placed
        with self._lock:
            sole = self._soles.get((namespace, epoch, salt))
            if sole is None:
                if node is not None and len(self._soles) < TENANTS_MAX:
                    self._soles[namespace, epoch, salt] = _Sole(node, asked_at, asked_at + placed.stands_s)
            elif asked_at >= sole.asked_at:
                sole.asked_at, sole.until = asked_at, 0.0
                if node is not None:
                    sole.node, sole.until = node, asked_at + placed.stands_s
        return placed

    # ------------------------------------------------------------------ telling

    def upkeep(self) -> None:
        """Tell what is due, and forget who stores no more. What a master does not hear now it is not told: it learns of
        the blocks from their node."""
        now = self._clock()
        with self._lock:
            for tenant in [each for each, sole in self._soles.items() if now >= sole.until and not sole.untold]:
                del self._soles[tenant]
            due = [each for each, sole in self._soles.items() if sole.untold and now - sole.since >= TELL_AFTER_S]
        if now >= self._tell_at:
            self._tell(due, now + TELL_S)

    def _tell(self, tenants: Sequence[_Tenant], deadline: float) -> None:
        for tenant in tenants:
            namespace, _, salt = tenant
            with self._lock:
                sole = self._soles.get(tenant)
                if sole is None or not sole.untold:
                    continue
                if self._clock() >= deadline:
                    return  # the others have the next turn
                untold = sole.take()
            try:
                self._ask(namespace, salt, b"", deadline, (), untold)
            except KVError as error:
                log.debug("a master is not told of stores", reason=f"{type(error).__name__}: {error}")
                with self._lock:
                    if sole := self._soles.get(tenant):
                        sole.until = 0.0
                if isinstance(error, Unavailable | Busy):
                    self._tell_at = self._clock() + PAUSE_S
                    return  # nor would it hear of the others

    def close(self) -> None:
        """Tell the rest."""
        with self._lock:
            rest = [tenant for tenant, sole in self._soles.items() if sole.untold]
        self._tell(rest, self._clock() + CLOSE_S)

    def check(self) -> None:
        """Assert every invariant."""
        with self._lock:
            assert len(self._soles) <= TENANTS_MAX
            for (namespace, epoch, _), sole in self._soles.items():
                assert namespace.pin.epoch == epoch, "a pin never moves"
                assert sole.blocks * namespace.hash_bytes == sum(map(len, sole.untold)) and sole.blocks <= UNTOLD_MAX
                assert sole.until <= sole.asked_at + STANDS_MAX_S


def _among(node: Endpoint, avoid: Sequence[Endpoint]) -> bool:
    return any(node.node_id == each.node_id and node.incarnation == each.incarnation for each in avoid)

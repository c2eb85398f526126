"""What a node says of itself: totals and problems, one source for health, metrics, NODE_INFO and masters."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.proto import control_pb2 as control
from kvstrata.storage.attach import MasterLink
from kvstrata.storage.identity import NodeIdentity
from kvstrata.storage.state import NodeState
from kvstrata.transfer.loops import Loops


@dataclass(frozen=True, slots=True)
class Totals:
    """A node at one moment. Bytes are what the allocator holds, tables of slabs not counted as used."""

    dram_bytes: int
    dram_bytes_used: int
    dram_bytes_free: int
    slab_bytes: int
    slabs: int
    slabs_free: int
    blocks: int
    leases: int
    reservations: int
    sessions: int
    namespaces: int
    salts: int
    slots: dict[int, tuple[int, int]]  #: slot bytes -> (taken, cut)
    counts: dict[str, int]


class NodeReport:
    """Thread-safe: takes the state's lock for a moment."""

    def __init__(
        self,
        identity: NodeIdentity,
        state: NodeState,
        lock: threading.Lock,
        loops: Loops,
        links: Sequence[MasterLink],
        clients: Callable[[], int],
        watched: Sequence[Callable[[], str]],
    ) -> None:
        self.identity = identity
        self.loops = loops
        self.links = links
        self.clients = clients
        self._state = state
        self._lock = lock
        self._watched = watched
        self._started = time.monotonic()

    def totals(self) -> Totals:
        state, arena = self._state, self._state.arena
        with self._lock:
            return Totals(
                dram_bytes=arena.bytes_total,
                dram_bytes_used=arena.bytes_used,
                dram_bytes_free=arena.bytes_total - arena.bytes_used,
                slab_bytes=arena.slab_bytes,
                slabs=len(arena.slabs),
                slabs_free=arena.free_slabs,
                blocks=state.inventory.visible,
                leases=len(state.leases),
                reservations=len(state.reservations),
                sessions=state.sessions,
                namespaces=state.namespaces,
                salts=len(state.inventory.policy.charges),
                slots=arena.capacity(),
                counts=dataclasses.asdict(state.counts),
            )

    def problems(self) -> list[str]:
        """Why the node is not well; empty when it is. A node without its masters still serves and is well."""
        return [*self.loops.problems(), *(problem for watch in self._watched if (problem := watch()))]

    def health(self) -> dict[str, Any]:
        """For ``/healthz`` and NODE_INFO: JSON-ready."""
        problems = self.problems()
        totals = dataclasses.asdict(self.totals())
        slots = totals.pop("slots")
        return {
            "healthy": not problems,
            "problems": problems,
            "role": "node",
            "node_id": self.identity.node_id,
            "incarnation": self.identity.incarnation,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "clients": self.clients(),
            "masters": [dataclasses.asdict(link.status()) for link in self.links],
            "loop_age_seconds": {name: round(age, 3) for name, age in self.loops.ages_s().items()},
            "slots": [{"slot_bytes": size, "taken": taken, "cut": cut} for size, (taken, cut) in sorted(slots.items())],
            **totals,
        }

    def node_status(self) -> control.NodeStatus:
        """What masters are told each second."""
        totals = self.totals()
        return control.NodeStatus(
            dram_bytes_used=totals.dram_bytes_used,
            dram_bytes_free=totals.dram_bytes_free,
            blocks=totals.blocks,
            clients=self.clients(),
            loop_age_seconds=self.loops.ages_s(),
            leases=totals.leases,
            reservations=totals.reservations,
        )

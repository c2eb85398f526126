"""What a node says of itself: totals and problems, one source for health, metrics, NODE_INFO and masters."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.status import Tier
from kvstrata.storage.identity import NodeIdentity
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.masters.attach import MasterLink
from kvstrata.storage.masters.commands import Commands
from kvstrata.storage.masters.usage import Told, WantedBook
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.storage.ssd.base import DeviceState
from kvstrata.storage.state import NodeState
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.security.opened import OPEN
from kvstrata.transfer.timings import Timings
from kvstrata.transfer.traces import trace_facts
from kvstrata.transfer.versions import RefusedVersions

if TYPE_CHECKING:
    from kvstrata.transfer.otlp import OtlpTracing


U64_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Device:
    """One SSD at one moment: ``state`` is scanning, serving or failed, and ``problem`` says why."""

    path: str
    state: str
    bytes: int
    bytes_used: int
    problem: str
    counts: dict[str, int]


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
    ssd_bytes: int = 0
    ssd_bytes_used: int = 0
    ssd_bytes_free: int = 0
    ssd_blocks: int = 0
    index_blocks: int = 0
    index_bytes: int = 0
    devices: tuple[Device, ...] = ()


def _tiers(charges: Sequence[Mapping[str, int]]) -> list[tuple[Tier, Mapping[str, int]]]:
    return list(zip((Tier.DRAM, Tier.SSD), charges, strict=False))


class NodeReport:
    """Thread-safe: takes the state's lock for a moment."""

    def __init__(
        self,
        identity: NodeIdentity,
        state: NodeState,
        lock: threading.Lock,
        loops: Loops,
        commands: Commands,
        links: Sequence[MasterLink],
        clients: Callable[[], int],
        watched: Sequence[Callable[[], str]],
    ) -> None:
        self.identity = identity
        self.loops = loops
        self.links = links
        self.clients = clients
        #: Peers of versions that this node does not speak with.
        self.refused_versions = RefusedVersions()
        #: Seconds of what clients ask; and this process's tracing, where there is any.
        self.timings: Timings | None = None
        self.traces: OtlpTracing | None = None
        #: One-sided transfers, and why there are none.
        self.rails: NodeRails | None = None
        self.no_rails = ""
        #: Who is let in.
        self.security = OPEN
        #: What the channel has refused, and why.
        self.channel_counts: Mapping[str, int] = {}
        self._commands = commands
        self._wanted = WantedBook()
        self._state = state
        self._lock = lock
        self._watched = watched
        self._started = time.monotonic()

    def totals(self) -> Totals:
        state, arena, ssd = self._state, self._state.arena, self._state.ssd
        devices = state.store.devices() if state.store is not None else []
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
                counts={name: getattr(state.counts, name) for name in state.counts.__slots__},
                ssd_bytes=ssd.arena.bytes_total if ssd is not None else 0,
                ssd_bytes_used=ssd.arena.bytes_used if ssd is not None else 0,
                ssd_bytes_free=ssd.arena.bytes_total - ssd.arena.bytes_used if ssd is not None else 0,
                ssd_blocks=ssd.visible if ssd is not None else 0,
                index_blocks=state.published.blocks if state.published is not None else 0,
                index_bytes=state.published.nbytes if state.published is not None else 0,
                devices=tuple(_device(index, device, ssd) for index, device in enumerate(devices)),
            )

    def problems(self) -> list[str]:
        """Why the node is not well; empty when it is. A node without its masters still serves and is well."""
        failed = [
            f"device {device.path} failed: {device.problem or 'no reason given'}"
            for device in (self._state.store.devices() if self._state.store is not None else [])
            if device.state == "failed"
        ]
        watches = [self._commands.problem, *self._watched, *([self.rails.problem] if self.rails is not None else [])]
        watched = [problem for watch in watches if (problem := watch())]
        return [*self.loops.problems(), *watched, *self.security.problems(), *failed]

    def health(self) -> dict[str, Any]:
        """For ``/healthz`` and NODE_INFO: JSON-ready."""
        problems = self.problems()
        totals = dataclasses.asdict(self.totals())
        drain, copies = self.drain(), self.copies()
        slots = totals.pop("slots")
        return {
            "healthy": not problems,
            "problems": problems,
            "warnings": self.security.warnings(),
            "security": self.security.facts(),
            "role": "node",
            "node_id": self.identity.node_id,
            "incarnation": self.identity.incarnation,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "clients": self.clients(),
            "refused_versions": self.refused_versions.counts(),
            "masters": [dataclasses.asdict(link.status()) for link in self.links],
            "shares_revision": self._commands.kept_revision,
            "leader_epoch": self.leader()[0],
            "orders_refused": self.leader()[1],
            "drain": drain,
            "copies": copies,
            "traces": trace_facts(self.traces),
            "rails": self.rails.health() if self.rails is not None else {"kind": "", "problem": self.no_rails},
            "loop_age_seconds": {name: round(age, 3) for name, age in self.loops.ages_s().items()},
            "slots": [{"slot_bytes": size, "taken": taken, "cut": cut} for size, (taken, cut) in sorted(slots.items())],
            **totals,
        }

    def drain(self) -> dict[str, Any]:
        """Whether the node is on its way out, and how far it is."""
        with self._lock:
            return self._state.draining.facts(time.monotonic())

    def leader(self) -> tuple[int, int]:
        """The epoch of the leader that is obeyed, and how many orders of others were refused since the start."""
        with self._lock:
            return self._commands.fence.epoch, self._commands.fence.refused

    def copies(self) -> dict[str, int]:
        """Orders to copy that are under way, and blocks and bytes copied from and to other nodes since the start."""
        with self._lock:
            return {"orders": len(self._state.copies), **dataclasses.asdict(self._state.copies.counts)}

    def tenants(self, salts: Sequence[str] | None) -> list[dict[str, Any]]:
        """Bytes and share of tenants on this node, as they are now; of the named ones, or of all that use anything."""
        state, now = self._state, time.monotonic()
        with self._lock:
            used = [inventory.policy.charges for inventory in state.tiers()]
            named = sorted({salt for charges in used for salt in charges}) if salts is None else list(salts)
            return [
                {
                    "salt": salt,
                    **{f"{tier.name.lower()}_bytes": charges.get(salt, 0) for tier, charges in _tiers(used)},
                    **{f"{tier.name.lower()}_limit": state.quotas.limit(tier, salt, now) for tier, _ in _tiers(used)},
                    **{f"{tier.name.lower()}_floor": state.quotas.floor(tier, salt) for tier, _ in _tiers(used)},
                }
                for salt in named
            ]

    def node_status(self, told: Told) -> control.NodeStatus:
        """What masters are told each second: of tenants, what changed since ``told``."""
        revision = self._commands.kept_revision  # first: what is used is then what these shares allowed
        with self._lock:
            tiers = self._state.tiers()
            used = [dict(inventory.policy.charges) for inventory in tiers]
            wanted = [inventory.take_wanted() for inventory in tiers]
            moved_out, moved_in = self._state.counts.bytes_out, self._state.counts.bytes_in
            copied = self._state.copies.counts.taken_bytes
            fence = self._commands.fence
            leader_epoch, leader_id = fence.epoch, fence.leader_id
        dram, ssd = used[0], used[1] if len(used) > 1 else {}
        self._wanted.add(wanted[0], wanted[1] if len(wanted) > 1 else {})
        tenants = self._wanted.report(dram, ssd, told)
        totals = self.totals()
        return control.NodeStatus(
            dram_bytes_used=totals.dram_bytes_used,
            dram_bytes_free=totals.dram_bytes_free,
            blocks=totals.blocks + totals.ssd_blocks,
            ssd_bytes_used=totals.ssd_bytes_used,
            ssd_bytes_free=totals.ssd_bytes_free,
            shares_revision=revision,
            tenants=[control.TenantUsage(**dataclasses.asdict(tenant)) for tenant in tenants],
            devices=[
                control.DeviceStatus(
                    path=device.path,
                    state=device.state,
                    bytes=device.bytes,
                    bytes_used=device.bytes_used,
                    problem=device.problem,
                )
                for device in totals.devices
            ],
            clients=self.clients(),
            loop_age_seconds=self.loops.ages_s(),
            leases=totals.leases,
            reservations=totals.reservations,
            bytes_out=min(moved_out, U64_MAX),  # by what clients say that they read
            bytes_in=moved_in,
            bytes_copied=copied,
            leader_epoch=leader_epoch,
            leader_id=leader_id,
        )


def _device(index: int, device: DeviceState, ssd: Inventory | None) -> Device:
    extents = [extent for extent in ssd.arena.slabs if extent.device == index] if ssd is not None else []
    used = sum(len(extent.blocks) * extent.slot_bytes for extent in extents)
    return Device(device.path, device.state, device.nbytes, used, device.problem, dict(device.counts))

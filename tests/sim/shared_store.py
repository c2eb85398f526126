"""A state store that several masters share, in memory: it can be out of reach, or be emptied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from kvstrata.master import messages as m
from kvstrata.master.saved import Saved
from kvstrata.master.stores.base import Deposed, LeaderRecord
from kvstrata.proto.errors import Unavailable


@dataclass
class StoreServer:
    """Rows, the lease, and who announced itself. ``clock`` is its own."""

    clock: Callable[[], float]
    down: bool = False
    cluster: str = "cluster-1"
    clusters: int = 1
    rows: dict[tuple[str, object], m.Save] = field(default_factory=dict)
    last_command: int = 0
    revision: int = 0
    epoch: int = 0
    leader: LeaderRecord | None = None
    lease_ends: float = 0.0
    known: dict[str, tuple[LeaderRecord, float]] = field(default_factory=dict)

    def empty(self) -> None:
        """Everything in it is lost, as by FLUSHALL."""
        self.rows, self.known = {}, {}
        self.last_command = self.revision = self.epoch = 0
        self.leader, self.lease_ends = None, 0.0
        self.cluster = ""

    def holder(self) -> LeaderRecord | None:
        return self.leader if self.leader is not None and self.clock() < self.lease_ends else None


class StoreClient:
    """One master's way to the store; ``cut`` while it cannot reach it."""

    def __init__(self, server: StoreServer, reaches: Callable[[], bool], shared: bool) -> None:
        self.shared = shared
        self.read_at = 0.0  #: what was saved until then its master knows
        self._server = server
        self._reaches = reaches

    def _reach(self) -> StoreServer:
        if self._server.down or not self._reaches():
            raise Unavailable("the state store is out of reach")
        return self._server

    def cluster_id(self) -> str:
        server = self._reach()
        if not server.cluster:
            server.clusters += 1
            server.cluster = f"cluster-{server.clusters}"
        return server.cluster

    def load(self) -> Saved:
        server = self._reach()
        rows = list(server.rows.values())

        def of(kind: type) -> tuple:  # type: ignore[type-arg]
            return tuple(row for row in rows if isinstance(row, kind))

        fallbacks = of(m.SaveFallback)
        return Saved(
            nodes=of(m.SaveNode),
            groups=of(m.SaveGroup),
            tombstones=of(m.SaveTombstone),
            last_command=server.last_command,
            policies=tuple(row.policy for row in of(m.SavePolicy)),
            fallback=fallbacks[0] if fallbacks else None,
            grants=of(m.SaveGrants),
            scopes=of(m.SaveScope),
            replicas=of(m.SaveReplicas),
            revision=server.revision,
            leader_epoch=server.epoch,
        )

    def save(self, writes: Iterable[m.Save], epoch: int = 0) -> None:
        server = self._reach()
        if epoch and server.epoch > epoch:
            raise Deposed(f"epoch {server.epoch} has begun")
        for write in writes:
            key, gone = _row(write)
            if gone:
                server.rows.pop(key, None)
            else:
                server.rows[key] = write
            server.last_command = max(server.last_command, getattr(write, "command", 0))
        server.revision += 1
        server.epoch = max(server.epoch, epoch)

    def revision(self) -> int:
        revision = self._reach().revision
        self.read_at = self._server.clock()  # its master loads what is newer
        return revision

    def campaign(self, me: LeaderRecord, ttl_ms: int) -> LeaderRecord:
        server = self._reach()
        holder = server.holder()
        if holder is not None and holder.master_id != me.master_id:
            return holder
        if holder is None:
            server.epoch = 1 + max(server.epoch, me.epoch)
            server.leader = replace(me, epoch=server.epoch)
        server.lease_ends = server.clock() + ttl_ms / 1000
        assert server.leader is not None
        return server.leader

    def resign(self, me: LeaderRecord) -> None:
        server = self._reach()
        if server.leader is not None and server.leader.master_id == me.master_id:
            server.leader = None

    def leader(self) -> LeaderRecord | None:
        return self._reach().holder()

    def masters(self) -> list[LeaderRecord]:
        server = self._reach()
        return [record for record, ends in server.known.values() if server.clock() < ends]

    def announce(self, me: LeaderRecord, ttl_ms: int) -> None:
        server = self._reach()
        server.known[me.master_id] = me, server.clock() + ttl_ms / 1000

    def close(self) -> None:
        """Nothing is held."""


def _row(write: m.Save) -> tuple[tuple[str, object], bool]:
    """(its key, whether it deletes)."""
    kind = type(write).__name__
    match write:
        case m.SaveNode():
            return (kind, write.node_id), write.removed
        case m.SaveGroup():
            return (kind, write.namespace.group), False
        case m.SaveTombstone():
            return (kind, write.command), not write.waiting
        case m.SavePolicy():
            return (kind, write.salt), write.policy is None
        case m.SaveFallback():
            return (kind, ""), False
        case m.SaveGrants():
            return (kind, write.node_id), False
        case m.SaveScope():
            return (kind, write.command), not write.waiting
        case m.SaveReplicas():
            return (kind, (write.group, write.salt)), not write.count

"""Which nodes a pool has, as its master says: before a replay, to size it; after it, to tell what was lost."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from kvstrata.client.admin import AdminClient
from kvstrata.client.masters import parse_masters
from kvstrata.proto.errors import Unavailable

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Roster:
    """``nodes``: id -> (incarnation, DRAM bytes) of the active ones. ``settled``: the master that
    answered first waits for none.

    ``started_at``: when the only master of the pool was started, on the monotonic clock; -inf where there are several,
    as one of them may be restarted at any time.
    """

    nodes: dict[str, tuple[int, int]]
    settled: bool
    started_at: float

    @classmethod
    def of(cls, masters: str) -> Roster:
        """Ask who leads, or whoever answers; raises :class:`Unavailable` when nobody does."""
        with AdminClient(masters) as admin:
            health, rows = admin.health(), admin.nodes()
        active = {row.node_id: (row.incarnation, row.dram_bytes) for row in rows if row.state == "active"}
        alone = len(parse_masters(masters)) == 1
        return cls(active, health.ready, time.monotonic() - health.uptime_seconds if alone else -math.inf)

    @classmethod
    def settled_of(cls, masters: str, timeout_s: float) -> Roster:
        """Wait for masters that have just started, or change who leads, to know their nodes, for that long at most."""
        until = time.monotonic() + timeout_s
        while not (roster := cls.of(masters)).settled and time.monotonic() < until:
            time.sleep(POLL_S)
        return roster

    @classmethod
    def with_nodes(cls, masters: str, count: int, timeout_s: float) -> Roster:
        """Wait until ``count`` nodes are active; raises :class:`Unavailable` past the deadline."""
        until = time.monotonic() + timeout_s
        while len((roster := cls.of(masters)).nodes) < count:
            if time.monotonic() > until:
                found = len(roster.nodes)
                raise Unavailable(
                    f"{found} of {count} nodes are active at {masters} after {timeout_s:g} s: see their logs"
                )
            time.sleep(POLL_S)
        return roster

    def losses(self, masters: str) -> list[str]:
        """What is gone or was restarted since this picture was taken."""
        try:
            now = Roster.of(masters)
        except Unavailable as error:
            return [str(error)]
        # A second of tolerance: uptime and our clock are read at different moments.
        lost = [f"the master at {masters} was restarted"] if now.started_at > self.started_at + 1.0 else []
        for node, (incarnation, _) in self.nodes.items():
            if node not in now.nodes:
                lost.append(f"node {node} is no longer active")
            elif now.nodes[node][0] != incarnation:
                lost.append(f"node {node} was restarted")
        return lost

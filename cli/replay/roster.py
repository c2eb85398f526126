"""Which nodes a pool has, as its master says: before a replay, to size it; after it, to tell what was lost."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvstrata.client.admin import AdminClient
from kvstrata.proto.errors import Unavailable

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Roster:
    """``nodes``: id -> (incarnation, DRAM bytes) of the active ones. ``started_at`` is on the monotonic clock."""

    nodes: dict[str, tuple[int, int]]
    started_at: float

    @classmethod
    def of(cls, masters: str) -> Roster:
        """Ask the first master that answers; raises :class:`Unavailable` when none does."""
        failures = []
        for address in masters.split(","):
            try:
                with AdminClient(address.strip()) as admin:
                    rows, uptime_s = admin.nodes(), admin.health().uptime_seconds
            except Unavailable as error:
                failures.append(str(error))
                continue
            active = {row.node_id: (row.incarnation, row.dram_bytes) for row in rows if row.state == "active"}
            return cls(active, time.monotonic() - uptime_s)
        raise Unavailable("; ".join(failures))

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

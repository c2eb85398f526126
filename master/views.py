"""What people and scripts may see of a master: rows and totals, built from a moment's state."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvstrata.master.hub import Hub
from kvstrata.master.liveness import NodeState
from kvstrata.master.nodes import Node
from kvstrata.master.replication.drains import Drain, DrainState
from kvstrata.master.state import MasterState
from kvstrata.proto import control_pb2 as control
from kvstrata.transfer.identity import SOFTWARE
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.security.opened import OPEN
from kvstrata.transfer.sessions import Session
from kvstrata.transfer.timings import Timings

if TYPE_CHECKING:
    from kvstrata.transfer.otlp import OtlpTracing


class Views:
    """Reads the hub, the channel's sessions and the loops. Every call is bounded and changes nothing."""

    def __init__(self, hub: Hub, sessions: Mapping[bytes, Session], loops: Loops) -> None:
        self.troubles: list[Callable[[], list[str]]] = []  #: what else may be a problem
        self.security = OPEN  #: who is let in
        self.channel_counts: Mapping[str, int] = {}  #: what the channel has refused, and why
        #: Seconds of what clients ask; and this process's tracing, where there is any.
        self.timings: Timings | None = None
        self.traces: OtlpTracing | None = None
        self._hub = hub
        self._sessions = sessions
        self._loops = loops

    def nodes(self) -> control.NodeList:
        """Every rostered node, those that are away included."""
        return self._hub.read(_node_list)

    def clients(self) -> control.ClientList:
        """Client processes that are connected now."""
        now = time.monotonic()
        return control.ClientList(clients=[_client_row(session, now) for session in self._client_sessions()])

    def namespaces(self) -> control.NamespaceList:
        """Every shard that has blocks, and shard 0 of every group that has none."""
        return self._hub.read(_namespace_list)

    def health(self) -> control.HealthReport:
        """Totals and problems; ``ready`` is False while lookups may still answer "not yet", and where nobody is known
        to lead: a rollout waits for both."""
        report = self._hub.read(_totals)
        report.cluster_id = self._hub.cluster_id
        report.software = SOFTWARE
        report.uptime_seconds = self._hub.uptime_s()
        report.clients = len(self._client_sessions())
        report.problems.extend([*self._loops.problems(), *filter(None, [self._hub.journal.problem()])])
        report.problems.extend(text for ask in self.troubles for text in ask())
        report.problems.extend(self.security.problems())
        report.healthy = not report.problems
        report.warnings.extend(self.security.warnings())
        report.security.CopyFrom(control.SecurityFacts(**self.security.facts()))
        report.leading, report.leader = self._hub.leads()
        report.ready &= bool(report.leading or report.leader)
        for name, age_s in self._loops.ages_s().items():
            report.loop_age_seconds[name] = age_s
        for software, count in self._hub.refused_versions.counts().items():
            report.refused_versions[software] = count
        return report

    def _client_sessions(self) -> list[Session]:
        return [session for session in list(self._sessions.values()) if session.hello.role == "client"]


def _node_list(state: MasterState, now: float) -> control.NodeList:
    blocks = state.directory.blocks_by_slot()
    return control.NodeList(nodes=[_node_row(state, node, blocks, now) for node in state.nodes])


def node_row(state: MasterState, node_id: str, now: float) -> control.NodeRow:
    """One node that is known."""
    node = state.nodes.get(node_id)
    assert node is not None, node_id
    return _node_row(state, node, state.directory.blocks_by_slot(), now)


def _node_row(state: MasterState, node: Node, blocks: Mapping[int, int], now: float) -> control.NodeRow:
    row = control.NodeRow(
        node_id=node.node_id, state=node.state.value, dram_bytes=node.dram_bytes, ssd_bytes=node.ssd_bytes
    )
    if node.facts is not None:
        facts = node.facts
        row.incarnation, row.software = facts.incarnation, facts.software
        row.channel, row.unix_path, row.http = facts.channel, facts.unix_path, facts.http
        row.host, row.boot_id = facts.host, facts.boot_id
    if node.pulse is not None:
        row.heartbeat_age_seconds = max(0.0, node.pulse.silence_s(now))
        row.progress_age_seconds = max(0.0, node.pulse.progress_age_s(now))
    if node.attachment is not None:
        row.applied_seq = node.attachment.applied_seq
        row.synced = node.attachment.synced
        row.blocks = 0 if node.attachment.slot is None else blocks.get(node.attachment.slot, 0)
    row.copies = state.replication.copies.commands_to(node.node_id)
    drain = state.replication.drains.of(node.node_id)
    if drain is not None:
        row.drain.CopyFrom(_drain_row(drain, now))
    elif node.leaving:
        row.drain.state = DrainState.DRAINING.value
    if node.usage is not None:
        usage = node.usage
        row.status.CopyFrom(
            control.NodeStatus(
                dram_bytes_used=usage.dram_bytes_used,
                dram_bytes_free=usage.dram_bytes_free,
                blocks=usage.blocks,
                ssd_bytes_used=usage.ssd_bytes_used,
                clients=usage.clients,
                leases=usage.leases,
                reservations=usage.reservations,
                loop_age_seconds=dict(usage.loop_age_seconds),
                ssd_bytes_free=usage.ssd_bytes_free,
                shares_revision=usage.shares_revision,
                devices=[
                    control.DeviceStatus(
                        path=d.path, state=d.state, bytes=d.nbytes, bytes_used=d.bytes_used, problem=d.problem
                    )
                    for d in usage.devices
                ],
                bytes_out=usage.bytes_out,
                bytes_in=usage.bytes_in,
                bytes_copied=usage.bytes_copied,
                leader_epoch=usage.leader_epoch,
                leader_id=usage.leader_id,
            )
        )
    return row


def _drain_row(drain: Drain, now: float) -> control.DrainRow:
    """How far a drain has got. Bytes are those of blocks, in whatever tier."""
    return control.DrainRow(
        state=drain.state.value,
        bytes_total=drain.bytes_total,
        bytes_moved=drain.bytes_moved,
        bytes_failed=drain.bytes_failed,
        elapsed_seconds=drain.elapsed_s(now),
        budget_seconds=drain.budget_s,
    )


def _client_row(session: Session, now: float) -> control.ClientRow:
    hello = session.hello
    return control.ClientRow(
        session=session.shown,
        name=hello.name,
        host=hello.host,
        pid=hello.pid,
        software=hello.software,
        connected_seconds=now - session.opened_at,
        lookups=session.requests,
        idle_seconds=max(0.0, now - session.used_at),
    )


def _namespace_list(state: MasterState, now: float) -> control.NamespaceList:
    blocks: Counter[tuple[int, int]] = Counter()
    salts: Counter[tuple[int, int]] = Counter()
    for table, count in state.directory.tables():
        blocks[table.group, table.shard] += count
        salts[table.group, table.shard] += 1
    rows = []
    for group in state.namespaces.groups:
        shards = sorted(shard for number, shard in blocks if number == group.number) or [0]
        for shard in shards:
            key = (group.number, shard)
            spec = group.namespace(shard).to_spec()
            rows.append(control.NamespaceRow(spec=spec, epoch=group.epoch, blocks=blocks[key], salts=salts[key]))
    return control.NamespaceList(namespaces=rows)


def _totals(state: MasterState, now: float) -> control.HealthReport:
    active = sum(node.state is NodeState.ACTIVE for node in state.nodes)
    standing = state.standing
    return control.HealthReport(
        epoch=standing.epoch if standing.leading else standing.heard,
        ready=not state.membership.recovering(now),
        blocks=state.directory.blocks,
        nodes_active=active,
        nodes_total=len(state.nodes),
    )

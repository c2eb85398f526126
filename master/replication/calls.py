"""What operators ask of replicas and nodes: drain, undrain, remove, how many replicas, and how that goes."""

from __future__ import annotations

from kvstrata.master.hub import Hub
from kvstrata.master.messages import Command
from kvstrata.master.state import MasterState
from kvstrata.master.status import orders
from kvstrata.master.views import node_row
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Unavailable
from kvstrata.proto.keys import check_salt


class Replicating:
    """Thread-safe: everything goes through the hub's lock. All of it raises :class:`NotLeader` on a standby."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def drain(self, request: control.NodeDrain) -> control.NodeRow:
        """Begin to empty a node, or (``cancel``) let it stay. Returns its row; the drain itself takes its time.

        Raises :class:`InvalidArgument` for a node that is not known, :class:`Unavailable` when a restart may forget.
        """

        def change(state: MasterState, now: float) -> tuple[control.NodeRow, list[Command]]:
            if request.cancel:
                state.replication.leavers.undrain(request.node_id)
            else:
                state.replication.leavers.drain(request.node_id, request.budget_ms / 1000, now)
            return node_row(state, request.node_id, now), state.taken()

        row = self._hub.order(change)
        self._make_durable("the node stays" if request.cancel else "the drain goes on")
        return row

    def remove(self, request: control.NodeRemove) -> control.NodeRow:
        """Take a node off the roster; returns its row of before.

        Raises :class:`InvalidArgument` for a node that is not known, :class:`Refused` for one that is here (unless
        ``force``), :class:`Unavailable` when a restart may forget.
        """

        def change(state: MasterState, now: float) -> tuple[control.NodeRow, list[Command]]:
            row = node_row(state, request.node_id, now) if state.nodes.get(request.node_id) else control.NodeRow()
            return row, state.remove_node(request.node_id, request.force, now)

        row = self._hub.order(change)
        self._make_durable("the node is off the roster")
        return row

    def set(self, request: control.Replicas) -> control.ReplicasList:
        """Give a tenant, a namespace or the default a number of replicas; 0 takes it away.

        Raises :class:`InvalidArgument`, :class:`Busy` at the bound of rules, and :class:`Unavailable` as above.
        """
        salt = check_salt(request.salt) if request.HasField("salt") else None

        def change(state: MasterState, now: float) -> tuple[None, list[Command]]:
            state.replication.set_rule(request.group, salt, request.count)
            return None, state.taken()

        self._hub.order(change)
        named = salt is not None and self._hub.read(lambda state, _: state.quotas.defined(salt))
        self._hub.ordered(orders.replicas_set(request.group, salt, request.count, named=named))
        self._make_durable("the number of replicas is in effect")
        return self.list()

    def list(self) -> control.ReplicasList:
        """All rules, the default, and replicas that are missing and too many, as the last scan counted them."""
        self._hub.require_leader()
        return self._hub.read(_list)

    def _make_durable(self, what: str) -> None:
        if not self._hub.durable():
            raise Unavailable(f"{what}, but a restart of this master may forget it: {self._hub.why_not_durable()}")


def _list(state: MasterState, now: float) -> control.ReplicasList:
    replication = state.replication
    rows = []
    for rule in replication.rules.rows():
        row = control.Replicas(group=rule.group, count=rule.count)
        if rule.salt is not None:
            row.salt = rule.salt
        if rule.group or rule.salt is not None:
            rows.append(row)
    return control.ReplicasList(
        rules=rows,
        fallback=replication.rules.fallback,
        wanting=replication.scan.wanting,
        surplus=replication.scan.surplus,
    )

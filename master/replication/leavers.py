"""Which nodes leave: those that an operator drains, those that say that they will stop, those taken off the roster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstrata.master import messages as m
from kvstrata.master.leadership.standing import Standing
from kvstrata.master.membership import Membership
from kvstrata.master.nodes import Node
from kvstrata.master.replication.drains import Drain, Drains
from kvstrata.proto.errors import InvalidArgument, Refused

#: Nodes that stay are told so, so long after this master began to lead: those that stop have said so by then.
REASSURE_S: Final = 5.0


class Leavers:
    """Part of :class:`Replication`; gives commands to ``emit``. ``drains`` takes what they offer."""

    def __init__(
        self,
        membership: Membership,
        drains: Drains,
        standing: Standing,
        emit: Callable[[m.Command], None],
        now: float,
    ) -> None:
        self._membership = membership
        self._drains = drains
        self._standing = standing
        self._emit = emit
        self._began_at = now
        self._reassured = False
        self._stopping: dict[str, int] = {}  #: node id to incarnation, of those that said so

    def new_term(self, now: float) -> None:
        """This master begins to lead, or ceases to: who will stop says so again to the leader."""
        self._began_at, self._reassured = now, False
        self._drains.clear()
        for node in self._membership.nodes:
            self._membership.leaves(node, stopping=False)
        self._stopping.clear()

    # ------------------------------------------------------------------ what operators ask

    def drain(self, node_id: str, budget_s: float, now: float) -> Drain:
        """A node is to be emptied, within ``budget_s`` (0: as long as it takes). Raises :class:`InvalidArgument`."""
        node = self._node(node_id)
        if not node.draining:
            self._membership.leaves(node, draining=True)
            self._emit(node.saved())
        return self._drains.begin(node, budget_s, now)

    def undrain(self, node_id: str) -> None:
        """A node stays after all. Raises :class:`InvalidArgument`."""
        node = self._node(node_id)
        self._stopping.pop(node_id, None)
        was_draining = node.draining
        self._membership.leaves(node, draining=False, stopping=False)
        if was_draining:
            self._emit(node.saved())
        self._drains.cancel(node)

    def remove(self, node_id: str, now: float, *, force: bool = False) -> None:
        """Take a node off the roster: nobody waits for it any more.

        Raises :class:`InvalidArgument`, and :class:`Refused` for a node that is here, unless ``force``.
        """
        node = self._node(node_id)
        if node.attachment is not None and not force:
            drain = self._drains.of(node_id)
            how = (
                "stop its process"
                if drain is not None and drain.ended_at is not None
                else (f"`kvstrata node drain {node_id}` first, and stop its process")
            )
            raise Refused(f"node {node_id} is {node.state.value}: {how}, or --force to cut it off")
        self._drains.forget(node_id)
        self._stopping.pop(node_id, None)
        self._membership.remove(node, now)

    # ------------------------------------------------------------------ what nodes say, and time

    def stopping(self, event: m.Leaving, now: float) -> None:
        """A node will stop, and asks to be drained first."""
        node = self._membership.nodes.of_session(event.session)
        if not self._standing.leading or node is None or node.attachment is None:
            return
        self._membership.leaves(node, stopping=True)
        self._stopping[node.node_id] = node.attachment.facts.incarnation
        self._drains.begin(node, event.budget_s, now)

    def turn(self, now: float) -> None:
        """A tick. Who said that it would stop has stopped, or is another process; who is to be drained is told."""
        for node_id, incarnation in list(self._stopping.items()):
            if not self._membership.knows(node_id, incarnation):
                del self._stopping[node_id]
                self._drains.forget(node_id)
                node = self._membership.nodes.get(node_id)
                if node is not None:
                    self._membership.leaves(node, stopping=False)
        if not self._reassured and now - self._began_at >= REASSURE_S:
            self._reassured = True
            for node in self._membership.nodes:
                if not node.leaving:
                    self._drains.reassure(node)
        for node in self._membership.nodes:
            if node.draining and node.serving and self._drains.of(node.node_id) is None:
                self._drains.begin(node, 0.0, now)

    def _node(self, node_id: str) -> Node:
        node = self._membership.nodes.get(node_id)
        if node is None:
            raise InvalidArgument(f"no node {node_id!r} is known: `kvstrata node list` shows them")
        return node

    def check(self) -> None:
        assert all(self._stopping)

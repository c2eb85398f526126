"""Bumps of weight epochs and drops of tenants and namespaces: gone here at once, then on every node.

What a scope holds is never looked at: its tables go whole. Nodes that are linked are told; those that are away
are told when they attach, before anything that they say of the scope counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstrata.master import messages as m
from kvstrata.master.content import scopes as scopes_module
from kvstrata.master.content.chronicle import Chronicle, Scope
from kvstrata.master.content.misses import MissReason
from kvstrata.master.content.scopes import Scopes
from kvstrata.master.content.tombstones import Tombstones
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.namespaces import Group, Namespaces
from kvstrata.master.nodes import Node, Nodes


@dataclass(frozen=True, slots=True)
class Cleared:
    """``blocks`` were known; ``awaited`` nodes are attached and have been told. ``epoch`` is of a bump, else 0."""

    command: int
    epoch: int
    blocks: int
    awaited: frozenset[str]


class Clearing:
    """Part of the master's state; gives commands to ``emit``."""

    def __init__(
        self,
        directory: Directory,
        namespaces: Namespaces,
        nodes: Nodes,
        tombstones: Tombstones,
        chronicle: Chronicle,
        emit: Callable[[m.Command], None],
    ) -> None:
        self.scopes = Scopes()
        #: Called with a group's name ("": all) and a tenant (None: all) whose blocks are no more.
        self.cleared: Callable[[str, str | None], None] = lambda group, salt: None
        self.drops = 0  #: grows with each drop of a tenant or namespace: intents of before are void
        self._directory = directory
        self._namespaces = namespaces
        self._nodes = nodes
        self._tombstones = tombstones
        self._chronicle = chronicle
        self._emit = emit

    # ------------------------------------------------------------------ orders

    def bump(self, name: str, now: float) -> Cleared:
        """Give a group its next weight epoch: all its blocks are of the past. O(tables and nodes).

        Raises :class:`InvalidArgument` for an unknown group, :class:`Busy` at the bound of what waits.
        """
        self.scopes.require_room()
        group, blocks = self._renew(name, None, now)
        scope = scopes_module.Scope(self._tombstones.take_number(), name, None, epoch=group.epoch)
        return Cleared(scope.command, group.epoch, blocks, self._order(scope))

    def drop(self, name: str, salt: str | None, erase: bool, now: float) -> Cleared:
        """Forget a tenant's part of a namespace; name "" is every namespace, salt None every tenant.

        The group itself stays known, with its epoch: its layout, and weights of the past, outlive its blocks.
        Raises as :meth:`bump`.
        """
        self.scopes.require_room()
        group = self._namespaces.named(name) if name else None
        blocks = self._directory.drop_tables(_within(group, salt), MissReason.DROPPED, now)
        self.drops += 1
        self._emit(m.Cleared(None if group is None else group.number, salt))
        self.cleared(name, salt)
        about = Scope(None if group is None else group.first, None, salt)
        self._chronicle.note(now, "dropped by an operator", "", about, reason=MissReason.DROPPED)
        scope = scopes_module.Scope(self._tombstones.take_number(), name, salt, erase)
        return Cleared(scope.command, 0, blocks, self._order(scope))

    def counted(self, name: str, salt: str | None) -> int:
        """Blocks that a drop would forget. Raises :class:`InvalidArgument` for an unknown group."""
        return self._directory.counted(_within(self._namespaces.named(name) if name else None, salt))

    def _renew(self, name: str, epoch: int | None, now: float) -> tuple[Group, int]:
        before = self._namespaces.named(name)
        after = self._namespaces.bump(name, epoch)
        blocks = self._directory.drop_tables(_within(before, None), MissReason.EPOCH, now, after.number)
        self._emit(m.SaveGroup(after.namespace(0), after.epoch))
        self._emit(m.Cleared(before.number, None))
        self.cleared(name, None)
        what = f"weight epoch {after.epoch} began"
        self._chronicle.note(now, what, "", Scope(after.first), reason=MissReason.EPOCH)
        return after, blocks

    def _order(self, scope: scopes_module.Scope) -> frozenset[str]:
        linked = [node for node in self._nodes if node.linked]
        scope.waiting = {node.node_id for node in self._nodes if node.may_hold_blocks}
        away = scope.waiting - {node.node_id for node in linked}
        for altered in self.scopes.add(scope, away):
            self._emit(altered.saved())
        for node in linked:
            self._tell(node, scope)
        return frozenset(node.node_id for node in linked)

    def _tell(self, node: Node, scope: scopes_module.Scope) -> None:
        assert node.attachment is not None
        session = node.attachment.session
        if scope.epoch is None:
            self._emit(m.SendDrop(session, scope.command, scope.group, scope.salt, scope.erase))
        else:
            epoch = max(scope.epoch, self._namespaces.named(scope.group).epoch)
            self._emit(m.SendEpoch(session, scope.command, scope.group, epoch))
        self.scopes.told(node.node_id, scope)

    # ------------------------------------------------------------------ nodes

    def told(self, node_id: str, epochs: Iterable[tuple[str, int]], now: float) -> None:
        """A node knows epochs that this master does not, as its store was lost or is an old copy: they hold, for all
        nodes, also before anybody has named their group here. Or blocks of them are the first that a master which leads
        hears: then another has led since, and begun them, and this one will hear of that, too."""
        for name, epoch in self._namespaces.newer(epochs):
            if self._namespaces.knows(name):
                self._renew(name, epoch, now)
            fields = {"node_id": node_id, "group": name, "epoch": epoch}
            self._emit(m.Report("node knows a newer weight epoch", fields))
            for node in self._nodes:
                if node.linked and node.attachment is not None:
                    self._emit(m.SendEpoch(node.attachment.session, 0, name, epoch))

    def learned(self, epochs: Iterable[tuple[str, int]], now: float) -> None:
        """Groups are at later weight epochs than is known here: somebody who leads has begun them."""
        for name, epoch in self._namespaces.newer(epochs):
            if self._namespaces.knows(name):
                self._renew(name, epoch, now)

    def renew(self, name: str, epoch: int, now: float) -> None:
        """A group's weight epoch is this one, whatever was known of it here."""
        self._renew(name, epoch, now)

    def attached(self, node: Node) -> None:
        """The node has been told all epochs; now it is told what it has not confirmed."""
        self.scopes.began(node.node_id)
        for scope in self.scopes.waiting_for(node.node_id):
            self._tell(node, scope)

    def done(self, node: Node, command: int, error: str) -> bool:
        """A node answered a command: True when what it said meanwhile was held back."""
        held = self.scopes.answered(node.node_id, command)
        if not error:
            self._confirmed(node.node_id, command)
        return held

    def forget(self, node_id: str) -> None:
        """Nothing waits for this node any more."""
        for scope in self.scopes.waiting_for(node_id):
            self._confirmed(node_id, scope.command)

    def _confirmed(self, node_id: str, command: int) -> None:
        scope = self.scopes.confirm(command, node_id)
        if scope is not None:
            self._emit(scope.saved())


def _within(group: Group | None, salt: str | None) -> Callable[[TableKey], bool]:
    return lambda key: (group is None or key.group == group.number) and salt in (None, key.salt)

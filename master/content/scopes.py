"""Drops and weight epochs that some node has not confirmed yet: kept until every rostered node has.

Unlike a removal, a drop names no blocks, and its node says nothing of them one by one. So until a node has
answered, what it says of a dropped scope is *held back*: it may be of before the drop. If anything was, the
node is asked for a snapshot once it has answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kvstrata.master.messages import SaveScope
from kvstrata.proto.errors import Busy

SCOPES_MAX: Final = 10_000


@dataclass(slots=True)
class Scope:
    """``group`` "" is every namespace, ``salt`` None every tenant; with ``epoch`` it is a bump, not a drop."""

    command: int
    group: str
    salt: str | None
    erase: bool = False
    epoch: int | None = None
    waiting: set[str] = field(default_factory=set)

    def saved(self) -> SaveScope:
        waiting = tuple(sorted(self.waiting))
        return SaveScope(self.command, self.group, self.salt, self.erase, self.epoch, waiting)

    def holds(self, group: str, salt: str) -> bool:
        """Whether a tenant's part of a group is within a drop."""
        return self.epoch is None and self.group in ("", group) and self.salt in (None, salt)

    def covers(self, other: Scope) -> bool:
        """Whoever obeys this need not be told of ``other`` any more."""
        if self.epoch is not None:
            return other.epoch is not None and other.group == self.group
        return (
            other.epoch is None
            and self.group in ("", other.group)
            and self.salt in (None, other.salt)
            and self.erase >= other.erase
        )


class Scopes:
    """All of them, by command number, and what is held back of whom."""

    def __init__(self) -> None:
        self._all: dict[int, Scope] = {}
        self._told: dict[str, dict[int, bool]] = {}  #: by node: unanswered drops, and whether they held back
        #: By command: later ones that nodes confirm in its place. Not durable: only for who waits for an answer.
        self._heirs: dict[int, dict[int, set[str]]] = {}

    def __iter__(self) -> Iterator[Scope]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def restore(self, saved: SaveScope) -> None:
        """Load a durable one at start."""
        self._all[saved.command] = Scope(
            saved.command, saved.group, saved.salt, saved.erase, saved.epoch, set(saved.waiting)
        )

    def clear(self) -> None:
        """Forget all: another master has them."""
        self._all.clear()
        self._told.clear()
        self._heirs.clear()

    def held(self, node_id: str) -> bool:
        """Whether something that the node said was held back: what is known of it is not all."""
        return any(self._told.get(node_id, {}).values())

    def require_room(self) -> None:
        """Raises :class:`Busy` at the bound."""
        if len(self._all) >= SCOPES_MAX:
            raise Busy(
                f"{len(self._all)} drops wait for nodes that are away: bring those nodes back, so that they confirm"
            )

    def add(self, scope: Scope, away: Iterable[str]) -> list[Scope]:
        """A new one; returns it, and those of before that the nodes ``away`` need not be told of any more.

        These stay unconfirmed by a node until it has confirmed the new one.
        """
        absent = set(away)
        if len(self._heirs) >= SCOPES_MAX:
            standing = [command for command in self._heirs if self.unconfirmed(command)]
            # Nobody waits for the oldest any more: an answer is waited for a minute at most.
            self._heirs = {command: self._heirs[command] for command in standing[-(SCOPES_MAX // 2) :]}
        altered = [scope] if scope.waiting else []
        for older in list(self._all.values()):
            moved = older.waiting & absent
            if scope.covers(older) and moved:
                older.waiting -= moved
                self._inherit(scope.command, older.command, moved)
                for node_id in absent:
                    self.answered(node_id, older.command)
                altered.append(older)
                self._drop_if_done(older)
        if scope.waiting:
            self._all[scope.command] = scope
        return altered

    # ------------------------------------------------------------------ one node

    def waiting_for(self, node_id: str) -> list[Scope]:
        """Those that ``node_id`` has to confirm, oldest first."""
        return [scope for _, scope in sorted(self._all.items()) if node_id in scope.waiting]

    def began(self, node_id: str) -> None:
        """A new session of the node: it has been told nothing in it."""
        self._told.pop(node_id, None)

    def told(self, node_id: str, scope: Scope) -> None:
        """The node has been sent it."""
        if scope.epoch is None:
            self._told.setdefault(node_id, {})[scope.command] = False

    def hold_back(self, node_id: str, group: str, salt: str) -> bool:
        """Whether what the node says it has there may be of before a drop that it has not answered."""
        told = self._told.get(node_id)
        if not told:
            return False
        commands = [command for command in told if self._all[command].holds(group, salt)]
        told.update(dict.fromkeys(commands, True))
        return bool(commands)

    def answered(self, node_id: str, command: int) -> bool:
        """The node has answered, well or not: True when something was held back meanwhile."""
        told = self._told.get(node_id, {})
        held = told.pop(command, False)
        if not told:
            self._told.pop(node_id, None)
        return held

    def confirm(self, command: int, node_id: str) -> Scope | None:
        """``node_id`` has done it; returns the scope if that changed it."""
        scope = self._all.get(command)
        if scope is None or node_id not in scope.waiting:
            return None
        scope.waiting.discard(node_id)
        self._drop_if_done(scope)
        return scope

    def unconfirmed(self, command: int) -> list[str]:
        """Nodes that have not confirmed ``command``, or what covers it; empty when it is done."""
        scope = self._all.get(command)
        left = set(scope.waiting) if scope is not None else set()
        for heir, nodes in self._heirs.get(command, {}).items():
            if heir in self._all:
                left |= nodes & self._all[heir].waiting
        return sorted(left)

    def _inherit(self, heir: int, command: int, moved: set[str]) -> None:
        """Nodes confirm ``heir`` in place of ``command``, and of whatever that had inherited."""
        for heirs in self._heirs.values():
            nodes = heirs.get(command, set())
            if nodes & moved:
                heirs[heir] = heirs.get(heir, set()) | (nodes & moved)
                heirs[command] = nodes - moved
        self._heirs.setdefault(command, {})[heir] = set(moved)

    def _drop_if_done(self, scope: Scope) -> None:
        if not scope.waiting:
            del self._all[scope.command]
            for node_id in list(self._told):
                self.answered(node_id, scope.command)

    def check(self) -> None:
        assert all(scope.waiting for scope in self._all.values())
        for node_id, told in self._told.items():
            assert told, node_id
            assert all(node_id in self._all[command].waiting for command in told), node_id

"""A master's state with a clock, driven event by event."""

from __future__ import annotations

import random
from collections.abc import Iterable

from kvstrata.master import messages as m
from kvstrata.master.content.clearing import Cleared
from kvstrata.master.content.lookups import LookedUp
from kvstrata.master.content.misses import MissReason
from kvstrata.master.liveness import NodeState
from kvstrata.master.placement import Placed
from kvstrata.master.saved import Saved
from kvstrata.master.state import MasterState, Removal
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus

NS = Namespace("model", block_bytes=1 << 20, block_tokens=16)
SALT = "tenant"


def hashes(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


class World:
    """A master's state, a clock, and everything it was told to do."""

    def __init__(self, saved: Saved = Saved(), grace_s: float = 5.0) -> None:  # noqa: B008
        self.now = 1000.0
        self.state = MasterState(self.now, random.Random(1), saved, grace_s)
        self.commands: list[m.Command] = []

    def tell(self, event: m.Event) -> list[m.Command]:
        commands = self.state.handle(event, self.now)
        self.state.check()
        self.commands += commands
        return commands

    def attach(self, node_id: str = "n", incarnation: int = 1, **facts: object) -> int:
        event = m.Attach(m.NodeFacts(node_id, incarnation, channel="h:1", dram_bytes=1 << 30, **facts))  # type: ignore[arg-type]
        return next(c.session for c in self.tell(event) if isinstance(c, m.SendAttached))

    def snapshot(
        self,
        session: int,
        cut: int,
        *numbers: int,
        first: bool = True,
        last: bool = True,
        salt: str = SALT,
        epoch: int = 0,
    ) -> list[m.Command]:
        holdings = (m.Holding(NS, salt, 0, hashes(*numbers), epoch),) if numbers else ()
        return self.tell(m.SnapshotPart(session, cut, holdings, first, last))

    def delta(
        self,
        session: int,
        seq: int,
        add: Iterable[int] = (),
        remove: Iterable[int] = (),
        salt: str = SALT,
        tier: int = 0,
        epoch: int = 0,
        reason: int = 0,
        cause: str = "",
    ) -> list[m.Command]:
        changes = [
            m.Change(True, NS, salt, tier, hashes(*add), epoch),
            m.Change(False, NS, salt, tier, hashes(*remove), epoch, reason, cause),
        ]
        return self.tell(m.DeltaBatch(session, seq, tuple(change for change in changes if change.hashes)))

    def up(self, *numbers: int, node_id: str = "n", incarnation: int = 1) -> int:
        """An attached node that holds ``numbers``, after delta 0."""
        session = self.attach(node_id, incarnation)
        self.snapshot(session, 0, *numbers)
        return session

    def lookup(self, *numbers: int, salt: str = SALT, epoch: int | None = None) -> LookedUp:
        return self.state.questions.lookup(NS, self.group(), salt, fold(hashes(*numbers), 16), "", self.now, epoch)

    def place(self, *numbers: int, salt: str = SALT, epoch: int | None = None) -> Placed:
        return self.state.questions.place(NS, self.group(), salt, fold(hashes(*numbers), 16), "", self.now, epoch)

    def group(self) -> int:
        opened, commands = self.state.open_namespace(NS)
        self.commands += commands
        return opened.group.number

    def found(self, *numbers: int, salt: str = SALT, epoch: int | None = None) -> list[int]:
        """Those of ``numbers`` that a lookup finds."""
        present = self.lookup(*numbers, salt=salt, epoch=epoch).found.present.tolist()
        return [number for number, here in zip(numbers, present, strict=True) if here]

    def miss(
        self,
        *numbers: int,
        incarnation: int = 1,
        seq: int,
        node_id: str = "n",
        epoch: int = 0,
        status: BlockStatus = BlockStatus.UNKNOWN,
        at_store: bool = False,
    ) -> None:
        opened, _ = self.state.open_namespace(NS)
        self.tell(
            m.MissReport(opened.handle, SALT, hashes(*numbers), node_id, incarnation, seq, epoch, status, at_store)
        )

    def remove(self, *numbers: int) -> Removal:
        removal, commands = self.state.remove(NS, SALT, hashes(*numbers), self.now)
        self.state.check()
        self.commands += commands
        return removal

    def wait(self, seconds: float, beating: Iterable[tuple[str, int]] = ()) -> None:
        """Let time pass, with ticks, and with heartbeats of those that live."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            for node_id, incarnation in beating:
                self.tell(m.Heartbeat(node_id, incarnation))
            self.tell(m.Tick())

    def node_state(self, node_id: str = "n") -> NodeState:
        node = self.state.nodes.get(node_id)
        assert node is not None
        return node.state

    def of(self, kind: type) -> list[m.Command]:
        return [command for command in self.commands if isinstance(command, kind)]

    def bump(self, group: str = NS.group) -> Cleared:
        cleared, commands = self.state.bump(group, self.now)
        self.state.check()
        self.commands += commands
        return cleared

    def drop(self, group: str = "", salt: str | None = None, *, erase: bool = False) -> Cleared:
        cleared, commands = self.state.drop(group, salt, erase, self.now)
        self.state.check()
        self.commands += commands
        return cleared

    def reasons(self, *numbers: int, salt: str = SALT) -> list[MissReason]:
        """Why those of ``numbers`` that a lookup does not find are not there."""
        return [MissReason(reason) for reason in self.lookup(*numbers, salt=salt).reasons.tolist()]

    def saved(self) -> Saved:
        """What a store would have kept of the commands so far."""
        nodes = {c.node_id: c for c in self.commands if isinstance(c, m.SaveNode)}
        groups = {c.namespace.group: c for c in self.commands if isinstance(c, m.SaveGroup)}
        stones = {c.command: c for c in self.commands if isinstance(c, m.SaveTombstone)}
        scopes = {c.command: c for c in self.commands if isinstance(c, m.SaveScope)}
        return Saved(
            tuple(nodes.values()),
            tuple(groups.values()),
            tuple(stone for stone in stones.values() if stone.waiting),
            max([0, *stones, *scopes]),
            scopes=tuple(scope for scope in scopes.values() if scope.waiting),
        )

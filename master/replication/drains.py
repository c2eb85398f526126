"""Nodes on their way out: what they offer is copied elsewhere, hottest first, within a budget of time.

A drain by an operator is durable: a node that comes back, or a new leader, begins it anew, and what is elsewhere by
then need not move. A node that is stopping asks for its own drain; that one ends with its process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np

from kvstrata.master import messages as m
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.nodes import Node
from kvstrata.master.replication.copies import Copies, Copy, TakeNumber
from kvstrata.master.replication.planner import BUSY, Planner, Why
from kvstrata.master.replication.replicas import Replicas
from kvstrata.master.replication.targets import Targets
from kvstrata.master.replication.waiting import Piece, Rows
from kvstrata.proto.status import CopyReason

#: Blocks of one node that may wait; what it offers beyond counts as failed.
OFFERED_MAX: Final = 1 << 22
#: A block is tried so often, on whatever node is the best then.
ATTEMPTS: Final = 3


class DrainState(StrEnum):
    """As operators see it."""

    DRAINING = "draining"
    DRAINED = "drained"
    OUT_OF_TIME = "out of time"


@dataclass(slots=True, eq=False)
class Drain:
    """One node's. Bytes are those of its blocks, in one tier each; ``session`` None: it has not been told yet."""

    node_id: str
    budget_s: float
    began_at: float
    ended_at: float | None = None
    state: DrainState = DrainState.DRAINING
    session: int | None = None
    command: int = 0
    whole: bool = False  #: all that it has to offer has been heard
    bytes_total: int = 0
    bytes_moved: int = 0
    bytes_failed: int = 0
    bytes_full: int = 0  #: moved to where others had to leave
    waiting: deque[Piece] = field(default_factory=deque)
    blocks: int = 0  #: that wait

    def elapsed_s(self, now: float) -> float:
        return (now if self.ended_at is None else self.ended_at) - self.began_at

    def put(self, piece: Piece, *, first: bool = False) -> None:
        (self.waiting.appendleft if first else self.waiting.append)(piece)
        self.blocks += len(piece)

    def begin(self, session: int, command: int, now: float) -> None:
        """The node is told, and will offer everything (again): within what is left of the budget, or, if that drain
        was over, within all of it."""
        if self.ended_at is not None:
            self.began_at = now
        self.session, self.command = session, command
        self.waiting.clear()
        self.blocks = self.bytes_total = self.bytes_moved = self.bytes_failed = self.bytes_full = 0
        self.whole = False
        self.state, self.ended_at = DrainState.DRAINING, None


class Drains:
    """All of them, by node id. Gives orders to ``emit``."""

    def __init__(
        self,
        directory: Directory,
        replicas: Replicas,
        copies: Copies,
        planner: Planner,
        locate: Callable[[m.Holding], TableKey | None],
        take_number: TakeNumber,
        emit: Callable[[m.Command], None],
    ) -> None:
        self._directory = directory
        self._replicas = replicas
        self._copies = copies
        self._planner = planner
        self._locate = locate
        self._take_number = take_number
        self._emit = emit
        self._all: dict[str, Drain] = {}
        self._cancelled: set[str] = set()  #: nodes that have not been told that they stay

    def __len__(self) -> int:
        return len(self._all)

    def of(self, node_id: str) -> Drain | None:
        return self._all.get(node_id)

    # ------------------------------------------------------------------ begin and end

    def begin(self, node: Node, budget_s: float, now: float) -> Drain:
        """The node is to leave; one that leaves already gets this budget, from now on."""
        drain = self._all[node.node_id] = Drain(node.node_id, budget_s, now)
        self._cancelled.discard(node.node_id)
        self._tell(drain, node, now)
        self._say("drain begins", drain, budget_s=budget_s)
        return drain

    def cancel(self, node: Node) -> None:
        """It stays after all. What was copied is let go where it is too much."""
        drain = self._all.pop(node.node_id, None)
        if drain is not None:
            self._say("drain cancelled", drain)
        self._cancelled.add(node.node_id)
        self._tell_cancelled(node)

    def reassure(self, node: Node) -> None:
        """It stays, as it may have been told otherwise by an earlier leader."""
        if node.node_id not in self._all:
            self._cancelled.add(node.node_id)

    def _tell_cancelled(self, node: Node) -> None:
        if node.linked and node.attachment is not None:
            self._cancelled.discard(node.node_id)
            self._emit(m.SendDrain(node.attachment.session, self._take_number(), cancel=True))

    def forget(self, node_id: str) -> None:
        """The node is off the roster, or its process is over."""
        self._all.pop(node_id, None)
        self._cancelled.discard(node_id)

    def clear(self) -> None:
        """Another master leads."""
        self._all.clear()
        self._cancelled.clear()

    def _tell(self, drain: Drain, node: Node, now: float) -> None:
        if not node.linked or node.attachment is None:
            return
        drain.begin(node.attachment.session, self._take_number(), now)
        left_s = max(1.0, drain.began_at + drain.budget_s - now) if drain.budget_s else 0.0
        self._emit(m.SendDrain(node.attachment.session, drain.command, left_s))

    # ------------------------------------------------------------------ what nodes say

    def offered(self, node: Node, event: m.Offer, now: float) -> None:
        """Part of what a node has; offers for an earlier drain are passed over."""
        drain = self._all.get(node.node_id)
        if drain is None or drain.command != event.command or drain.session != event.session:
            return
        if drain.whole or drain.state is not DrainState.DRAINING:
            return
        drain.bytes_total = max(drain.bytes_total, event.bytes_total)
        drain.whole = event.last
        for holding in event.holdings:
            rows = np.frombuffer(holding.hashes, dtype=np.uint8).reshape(-1, holding.namespace.hash_bytes)
            nbytes = len(rows) * holding.namespace.block_bytes
            table = self._locate(holding)
            fits = rows[: OFFERED_MAX - drain.blocks]
            if table is None:  # of a past epoch, or a namespace that is not known: nobody finds these
                drain.bytes_moved += nbytes
                continue
            if len(fits):
                drain.put(Piece(table, fits, pressing=True))
            drain.bytes_failed += (len(rows) - len(fits)) * holding.namespace.block_bytes

    def copied(self, copy: Copy, taken: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """A copy for a drain has ended; what was not taken is tried again, some times."""
        drain = self._all.get(copy.drains)
        if drain is None or drain.state is not DrainState.DRAINING:
            return
        block_bytes = copy.nbytes // len(copy.rows)
        drain.bytes_moved += int(np.count_nonzero(taken)) * block_bytes
        left = copy.rows[~taken]
        if not len(left):
            return
        if copy.attempts + 1 >= ATTEMPTS:
            drain.bytes_failed += len(left) * block_bytes
        else:
            drain.put(Piece(copy.table, left, pressing=True, attempts=copy.attempts + 1), first=True)

    # ------------------------------------------------------------------ time

    def turn(self, nodes: Callable[[str], Node | None], targets: Targets, budget: int, now: float) -> None:
        """Order copies of up to ``budget`` blocks; see whose time is over, and who has to be told (again)."""
        for node_id in list(self._cancelled):
            staying = nodes(node_id)
            if staying is None:
                self._cancelled.discard(node_id)
            else:
                self._tell_cancelled(staying)
        for drain in list(self._all.values()):
            node = nodes(drain.node_id)
            if node is None:
                del self._all[drain.node_id]
                continue
            if node.linked and node.attachment is not None and node.attachment.session != drain.session:
                self._tell(drain, node, now)
            if drain.state is not DrainState.DRAINING:
                continue
            if drain.budget_s and drain.elapsed_s(now) >= drain.budget_s:
                self._end(drain, DrainState.OUT_OF_TIME, now)
                continue
            if node.linked and node.serving:
                budget = self._go_on(drain, node, targets, budget, now)
            if drain.whole and not drain.blocks and not self._copies.of_drain(drain.node_id):
                self._end(drain, DrainState.DRAINED, now)

    def _go_on(self, drain: Drain, node: Node, targets: Targets, budget: int, now: float) -> int:
        later: list[Piece] = []
        share = self._kept_share(node)
        while drain.waiting and budget > 0:
            piece = drain.waiting.popleft()
            if len(piece) > budget:
                drain.waiting.appendleft(piece.of(piece.rows[budget:]))
                piece = piece.of(piece.rows[:budget])
            budget -= len(piece)
            drain.blocks -= len(piece)
            left = self._place(drain, piece, targets, share, now)
            if len(left):
                later.append(piece.of(left))
        for piece in reversed(later):
            drain.put(piece, first=True)
        return budget

    def _kept_share(self, node: Node) -> float:
        """The part of what is offered that is worth more than the coldest of what is elsewhere, at a guess."""
        others = sum(taker.dram_bytes + taker.ssd_bytes for taker in self._replicas.takers)
        return others / (others + node.dram_bytes + node.ssd_bytes) if others else 0.0

    def _place(self, drain: Drain, piece: Piece, targets: Targets, share: float, now: float) -> Rows:
        """Have a piece copied; returns the rows that must wait."""
        found = self._planner.located(piece.table, piece.rows)
        if found is None:
            return piece.rows[:0]
        group, rows, keys, scoped = found
        ids = self._directory.living_ids(piece.table, keys)
        safe = (ids == 0) | (self._replicas.stands(ids) > 0)
        drain.bytes_moved += int(np.count_nonzero(safe)) * group.block_bytes
        moving = ~safe & self._copies.moving(scoped)
        waits = moving.copy()
        todo = ~safe & ~moving
        for set_id in np.unique(ids[todo]).tolist():
            where = np.flatnonzero(todo & (ids == set_id))
            for pressing in (False, True):
                if pressing and drain.bytes_full >= share * drain.bytes_total:
                    break
                why = Why(CopyReason.DRAIN, pressing, drain.node_id, piece.attempts)
                args = (piece.table, group, set_id, rows[where], scoped[where], why, targets, now)
                left, verdict = self._planner.copy(*args)
                if pressing:
                    drain.bytes_full += (len(where) - left) * group.block_bytes
                where = where[len(where) - left :]
                if verdict == BUSY:
                    waits[where] = True
                    where = where[:0]
                if not len(where):
                    break
            drain.bytes_failed += len(where) * group.block_bytes
        waiting: Rows = rows[waits]
        return waiting

    def _end(self, drain: Drain, state: DrainState, now: float) -> None:
        drain.state, drain.ended_at = state, now
        drain.waiting.clear()
        drain.blocks = 0
        problem = ""
        if drain.bytes_failed or state is DrainState.OUT_OF_TIME:
            left = max(drain.bytes_failed, drain.bytes_total - drain.bytes_moved)
            problem = f"{state.value}: {left} bytes of {drain.bytes_total} are nowhere else"
        if drain.session is not None:
            self._emit(m.SendDrained(drain.session, drain.command, problem))
        self._say("drain over", drain, state=state.value, seconds=round(drain.elapsed_s(now), 1), problem=problem)

    def _say(self, event: str, drain: Drain, **more: object) -> None:
        fields = {
            "node_id": drain.node_id,
            "bytes_total": drain.bytes_total,
            "bytes_moved": drain.bytes_moved,
            "bytes_failed": drain.bytes_failed,
            **more,
        }
        self._emit(m.Report(event, fields))

    def check(self) -> None:
        for drain in self._all.values():
            assert drain.blocks == sum(len(piece) for piece in drain.waiting) <= OFFERED_MAX
            assert drain.state is DrainState.DRAINING or not drain.waiting
            assert (drain.ended_at is None) == (drain.state is DrainState.DRAINING)

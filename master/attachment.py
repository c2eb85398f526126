"""One node's sync session: snapshot in shadow, numbered deltas, gaps, the swap."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from kvstrata.master.content.misses import MissReason, departed
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.master.messages import Change, DeltaBatch, Holding, NodeFacts, SnapshotPart

#: Bytes of hashes in deltas kept while a snapshot loads. Past it the node is asked for a new one.
KEPT_BYTES_MAX: Final = 64 << 20

#: Resolves (namespace, salt, packed hashes) to a table and keys; None for a layout that is refused.
Locate = Callable[[Holding | Change], "tuple[TableKey, Keys] | None"]


class Outcome(Enum):
    """What became of a snapshot part or a delta."""

    APPLIED = auto()
    SWAPPED = auto()  #: a snapshot is complete and in service
    KEPT = auto()  #: waits for the snapshot
    IGNORED = auto()  #: a duplicate, or older than what is known
    GAP = auto()  #: something is missing: ask for a new snapshot
    WAITING = auto()  #: after a gap; a new snapshot was asked for and has not begun


class Attachment:
    """Owns up to two directory slots: the one in service, and the one a snapshot loads into.

    A re-attachment of the same incarnation inherits the slot in service, which answers until the swap. Where
    nothing speaks against it (``resume``), its node may go on after ``resume_seq`` instead of sending a snapshot.
    """

    def __init__(
        self, session: int, facts: NodeFacts, inherited: Attachment | None = None, *, resume: bool = False
    ) -> None:
        self.session = session
        self.facts = facts
        self.slot: int | None = None
        self.applied_seq = 0
        self.synced = False
        self.gap = ""
        self._shadow: int | None = None
        self._cut_seq = 0
        self._asked = False
        self._kept: list[DeltaBatch] = []
        self._kept_bytes = 0
        if inherited is not None:
            self.slot, inherited.slot = inherited.slot, None
            self.applied_seq = inherited.applied_seq
            self.synced = resume and inherited.trusted
        self.resume_seq = self.applied_seq if self.synced else 0

    @property
    def trusted(self) -> bool:
        """What is in service is all that the node had at ``applied_seq``, as far as anybody knows."""
        return self.synced and not self._asked and not self.loading

    @property
    def slots(self) -> list[int]:
        return [slot for slot in (self.slot, self._shadow) if slot is not None]

    @property
    def loading(self) -> bool:
        """A snapshot has begun and not ended."""
        return self._shadow is not None

    def release(self, directory: Directory) -> None:
        """Forget everything this attachment said: what only its node had is lost."""
        self._drop_shadow(directory)
        if self.slot is not None:
            directory.drop_slot(self.slot, MissReason.NODE_LOST)
        self.slot = self._shadow = None
        self.synced = False
        self._forget_kept()

    # ------------------------------------------------------------------ snapshot

    def snapshot(self, part: SnapshotPart, directory: Directory, locate: Locate) -> Outcome:
        """Load a part. ``first`` starts over, whatever was loading before."""
        if part.first:
            self._drop_shadow(directory)
            self._shadow = directory.take_slot()
            self._cut_seq = part.cut_seq
            self._asked = False
        if self._shadow is None:
            return Outcome.WAITING if self._asked else self._gap(directory, "a snapshot part came before its first")
        if part.cut_seq != self._cut_seq:
            return self._gap(directory, f"a snapshot part of cut {part.cut_seq} within one of cut {self._cut_seq}")
        for holding in part.holdings:
            located = locate(holding)
            if located is not None:
                directory.add(self._shadow, located[0], holding.tier, located[1])
        return self._swap(directory, locate) if part.last else Outcome.APPLIED

    def _swap(self, directory: Directory, locate: Locate) -> Outcome:
        assert self._shadow is not None
        kept = [delta for delta in self._kept if delta.seq > self._cut_seq]
        if kept and kept[0].seq != self._cut_seq + 1:
            return self._gap(directory, f"the snapshot ends at delta {self._cut_seq}, the next known is {kept[0].seq}")
        old, self.slot, self._shadow = self.slot, self._shadow, None
        self.applied_seq = self._cut_seq
        self.synced = True
        if old is not None:
            directory.drop_slot(old, MissReason.EVICTED)
        self._forget_kept()
        for delta in kept:
            self._apply(delta, directory, locate)
        return Outcome.SWAPPED

    def _drop_shadow(self, directory: Directory) -> None:
        if self._shadow is not None:
            directory.drop_slot(self._shadow)
            self._shadow = None

    # ------------------------------------------------------------------ deltas

    def delta(self, delta: DeltaBatch, directory: Directory, locate: Locate) -> Outcome:
        """Apply, keep, ignore, or find a gap."""
        if self._shadow is None and self.synced and not self._asked:
            if delta.seq <= self.applied_seq:
                return Outcome.IGNORED
            if delta.seq != self.applied_seq + 1:
                outcome = self._gap(directory, f"delta {delta.seq} came after delta {self.applied_seq}")
                self._keep(delta, directory)
                return outcome
            self._apply(delta, directory, locate)
            return Outcome.APPLIED
        return self._keep(delta, directory)

    def _keep(self, delta: DeltaBatch, directory: Directory) -> Outcome:
        outcome = Outcome.KEPT
        if self._kept:
            last = self._kept[-1].seq
            if delta.seq <= last:
                return Outcome.IGNORED
            if delta.seq != last + 1:
                outcome = self._gap(directory, f"delta {delta.seq} came after delta {last}")
        size = sum(len(change.hashes) for change in delta.changes)
        if self._kept_bytes + size > KEPT_BYTES_MAX:
            return self._gap(directory, f"more than {KEPT_BYTES_MAX} bytes of deltas came before the snapshot's end")
        self._kept_bytes += size
        self._kept.append(delta)
        return outcome

    def _apply(self, delta: DeltaBatch, directory: Directory, locate: Locate) -> None:
        assert self.slot is not None and delta.seq == self.applied_seq + 1
        for change in delta.changes:
            located = locate(change)
            if located is None:
                continue
            table, keys = located
            if change.added:
                directory.add(self.slot, table, change.tier, keys)
            else:
                directory.remove(self.slot, table, change.tier, keys, departed(change.reason))
        self.applied_seq = delta.seq
        directory.applied(self.slot, delta.seq)

    # ------------------------------------------------------------------ gaps

    def start_over(self, directory: Directory, reason: str) -> Outcome:
        """What is known may be wrong: ``GAP`` when a new snapshot is to be asked for, else one is coming."""
        return self._gap(directory, reason)

    def _gap(self, directory: Directory, reason: str) -> Outcome:
        """Start over: what is in service stays, what was loading goes."""
        self._drop_shadow(directory)
        self._forget_kept()
        if self._asked:
            return Outcome.WAITING
        self._asked = True
        self.gap = reason
        return Outcome.GAP

    def _forget_kept(self) -> None:
        self._kept = []
        self._kept_bytes = 0

    def check(self) -> None:
        assert self.slot != self._shadow or self.slot is None
        assert not self.synced or self.slot is not None
        assert all(b.seq == a.seq + 1 for a, b in zip(self._kept, self._kept[1:], strict=False))
        assert self._kept_bytes == sum(len(c.hashes) for delta in self._kept for c in delta.changes)

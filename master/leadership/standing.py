"""Whether this master leads, in which epoch, and what nodes have said of others that do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Epochs count leaders; a number past this was never one.
EPOCH_MAX: Final = 1 << 31


@dataclass(slots=True)
class Standing:
    """Shared by the rooms of one master's state: only who leads orders nodes and writes to the store.

    ``epoch`` is of this master's lead, or of the last one. ``heard`` is the greatest that anybody told of.
    """

    leading: bool = True
    epoch: int = 0
    master_id: str = ""
    heard: int = 0
    contested: bool = False  #: a node obeys another master in this very epoch
    #: Grows when this master begins or ceases to lead: what was ordered before is another leader's.
    terms: int = 0

    @property
    def deposed(self) -> bool:
        """Some node obeys another leader: none obeys this one any more, or soon will not."""
        return self.leading and (self.heard > self.epoch or self.contested)

    def told(self, epoch: int, leader_id: str = "") -> None:
        """A node says whom it has obeyed: the leader of ``epoch``."""
        if epoch > EPOCH_MAX:
            return
        self.heard = max(self.heard, epoch)
        if self.leading and epoch and epoch == self.epoch and leader_id not in ("", self.master_id):
            self.contested = True

    def outdone(self, epoch: int, leader_id: str) -> int | None:
        """The epoch past which to lead for a node to obey, that has obeyed the leader of ``epoch``; None if it will."""
        ours = epoch == self.epoch and leader_id in ("", self.master_id)
        heard = max(epoch, self.heard)
        return None if epoch < self.epoch or ours or heard >= EPOCH_MAX else heard

    def lead(self, epoch: int) -> None:
        """Lead from now on, or go on in a greater epoch."""
        if not self.leading:
            self.terms += 1
        self.leading, self.epoch, self.contested = True, epoch, False
        self.heard = max(self.heard, epoch)

    def follow(self) -> None:
        """Lead no more."""
        if self.leading:
            self.terms += 1
        self.leading = self.contested = False

    def check(self) -> None:
        assert self.heard >= self.epoch, (self.heard, self.epoch)

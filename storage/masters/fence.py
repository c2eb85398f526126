"""Which leader's orders this node obeys: those of the greatest epoch that it has heard of, by one master. Sans-IO.

Masters may disagree for a while on who of them leads: one was stopped, or cut off, and does not know that another
has taken over. The node decides by itself, and remembers it over a restart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Fence:
    """``epoch`` 0: no leader has been heard yet, and so whoever speaks is obeyed."""

    epoch: int = 0
    leader_id: str = ""
    refused: int = 0  #: orders, since the start

    def admit(self, epoch: int, leader_id: str) -> str:
        """Why what this leader says is not obeyed; "" when it is, and then nothing of an earlier one any more."""
        if epoch > self.epoch:
            self.epoch, self.leader_id = epoch, leader_id
        elif epoch < self.epoch:
            who = f"the leader of epoch {epoch}" if epoch else "a master that does not lead"
            return f"deposed: {who} orders, and this node obeys {self.leader_id} of epoch {self.epoch}"
        elif leader_id != self.leader_id:
            return f"deposed: {leader_id} orders in epoch {epoch}, in which this node obeys {self.leader_id}"
        return ""

    def check(self) -> None:
        """Assert that a leader has an epoch."""
        assert self.epoch >= 0 and self.refused >= 0
        assert self.epoch or not self.leader_id

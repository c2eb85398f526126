"""Is a node alive? Three states and one for arriving, from signs of life with their times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: No sign of life, no progress or no sync stream for this long: nothing is routed there.
SUSPECTED_S: Final = 3.0
#: No sign of life for this long: its replicas leave the directory.
OFFLINE_S: Final = 10.0


class NodeState(StrEnum):
    """What an operator sees, and what routing goes by: only ``ACTIVE`` nodes are read from or written to."""

    JOINING = "joining"  #: attached; its snapshot is still loading
    ACTIVE = "active"
    SUSPECTED = "suspected"  #: nothing is routed there, nothing is forgotten
    OFFLINE = "offline"


@dataclass(slots=True)
class Pulse:
    """Signs of life of one attachment. All times are the owner's monotonic seconds."""

    heard_at: float
    progress_at: float
    link_lost_at: float | None = None
    dying: bool = False

    @classmethod
    def starting(cls, now: float) -> Pulse:
        return cls(heard_at=now, progress_at=now)

    def beat(self, now: float, progress_age_s: float, *, dying: bool) -> None:
        """A heartbeat: the process lives; its main loop last moved ``progress_age_s`` ago."""
        self.heard_at = max(self.heard_at, now)
        self.progress_at = max(self.progress_at, now - progress_age_s)
        self.dying = self.dying or dying

    def spoke(self, now: float) -> None:
        """A message from the node's main process: alive, and moving."""
        self.heard_at = max(self.heard_at, now)
        self.progress_at = max(self.progress_at, now)

    def forgive(self, now: float, pause_s: float) -> None:
        """The listener itself stood still for ``pause_s``: silence meanwhile says nothing of the node."""
        self.heard_at = min(now, self.heard_at + pause_s)
        self.progress_at = min(now, self.progress_at + pause_s)
        if self.link_lost_at is not None:
            self.link_lost_at = min(now, self.link_lost_at + pause_s)

    def silence_s(self, now: float) -> float:
        return now - self.heard_at

    def progress_age_s(self, now: float) -> float:
        return now - self.progress_at

    def judge(self, now: float, *, synced: bool) -> NodeState:
        """The state at ``now``. Only death or silence means offline; standing still never does by itself."""
        if self.dying or self.silence_s(now) >= OFFLINE_S:
            return NodeState.OFFLINE
        if self.silence_s(now) >= SUSPECTED_S or self.progress_age_s(now) >= SUSPECTED_S:
            return NodeState.SUSPECTED
        if self.link_lost_at is not None and now - self.link_lost_at >= SUSPECTED_S:
            return NodeState.SUSPECTED
        return NodeState.ACTIVE if synced else NodeState.JOINING

    def doubt(self, now: float) -> str:
        """What speaks against the node at ``now``; empty for one that is well."""
        if self.dying:
            return "its process died"
        if self.silence_s(now) >= SUSPECTED_S:
            return f"silent for {self.silence_s(now):.1f} s"
        if self.progress_age_s(now) >= SUSPECTED_S:
            return f"its main loop has not moved for {self.progress_age_s(now):.1f} s"
        if self.link_lost_at is not None:
            return f"without a sync stream for {now - self.link_lost_at:.1f} s"
        return ""

"""Whether this node is on its way out: what it was ordered, and what it has offered. Sans-IO."""

from __future__ import annotations

from enum import Enum
from typing import Any


class DrainState(Enum):
    """A drained node goes on refusing and serving until it stops, or the drain is cancelled."""

    NONE = ""
    DRAINING = "draining"
    DRAINED = "drained"


class Draining:
    """One drain at a time. Times are monotonic seconds. Not thread-safe: the node's lock covers it."""

    def __init__(self) -> None:
        self.state = DrainState.NONE
        self.command = 0
        self.budget_s = 0.0  #: 0: as long as it takes
        self.since = 0.0
        self.problem = ""  #: why blocks were left behind, once drained
        self.bytes_total = 0
        self.bytes_offered = 0

    @property
    def refuses(self) -> bool:
        """Whether new blocks are refused."""
        return self.state is not DrainState.NONE

    def begin(self, command: int, budget_s: float, now: float) -> None:
        """Take no new blocks from now on. The same drain may be ordered again, after a new attachment."""
        if self.state is DrainState.NONE or command != self.command:
            self.since = now
        self.state, self.command, self.budget_s, self.problem = DrainState.DRAINING, command, budget_s, ""
        self.bytes_total = self.bytes_offered = 0

    def cancel(self) -> None:
        """Stay after all."""
        self.state, self.command, self.problem = DrainState.NONE, 0, ""
        self.bytes_total = self.bytes_offered = 0

    def over(self, command: int, problem: str) -> bool:
        """The leader says that all is elsewhere, or cannot be. False for another drain than the one under way."""
        if self.state is DrainState.NONE or command != self.command:
            return False
        self.state, self.problem = DrainState.DRAINED, problem
        return True

    def facts(self, now: float) -> dict[str, Any]:
        """For health; bytes and seconds."""
        going = self.state is not DrainState.NONE
        return {
            "state": self.state.value,
            "elapsed_seconds": round(now - self.since, 3) if going else 0.0,
            "budget_seconds": self.budget_s if going else 0.0,
            "bytes_total": self.bytes_total,
            "bytes_offered": self.bytes_offered,
            "problem": self.problem,
        }

    def check(self) -> None:
        """Assert that a node which stays has no drain."""
        assert 0 <= self.bytes_offered <= self.bytes_total
        assert self.state is not DrainState.NONE or not (self.command or self.bytes_total or self.problem)

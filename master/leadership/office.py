"""How this master begins to lead, leads on, ceases to and follows: by changes of the hub's state."""

from __future__ import annotations

from kvstrata.master.hub import Hub
from kvstrata.master.leadership import succession
from kvstrata.master.saved import Saved


class Office:
    """Thread-safe: everything goes through the hub's lock."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def lead(self, saved: Saved, epoch: int) -> None:
        """Begin to lead by what the store has, in an epoch that it gave."""
        self._hub.succeed(lambda state, now: succession.take_over(state, saved, epoch, now), epoch)

    def lead_on(self, epoch: int) -> None:
        """Go on leading in a greater epoch."""
        self._hub.succeed(lambda state, now: succession.go_on(state, epoch), epoch)

    def step_down(self, reason: str) -> None:
        """Another master leads, or may: what waits to be written is not this one's to write."""
        self._hub.succeed(lambda state, now: succession.step_down(state, reason, now))

    def follow(self, saved: Saved, *, exact: bool = False) -> None:
        """Take note of what the leader has saved; see :func:`succession.follow`."""
        self._hub.succeed(lambda state, now: succession.follow(state, saved, now, exact=exact))

    def reconcile(self, saved: Saved) -> bool:
        """Write again what a store that has only ``saved`` lacks; True once it is in."""
        self._hub.change(lambda state, now: (None, succession.reconcile(state, saved, now)))
        return self._hub.durable()

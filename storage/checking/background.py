"""The scrub that never ends: what lies on SSD is read back at a low rate, so that bits that turned are found
before the last good replica of a block has gone elsewhere.

Readers verify what they read in any case; this is for what nobody reads. Memory is not scrubbed here: a node that
is asked to (``kvstrata node check --scrub``) does that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvstrata.storage.checking.scrub import Scrub
from kvstrata.storage.checking.scrubber import Scrubber
from kvstrata.storage.tiers.moves import TierMoves

PERIOD_S: Final = 1.0
#: A turn ends after this, however slow the device is.
TURN_S: Final = 5.0
BOUND_S: Final = 30.0


class BackgroundScrub:
    """``turn`` belongs in a loop of ``PERIOD_S``. ``rate`` in bytes a second, more than 0."""

    def __init__(
        self, moves: TierMoves, scrubber: Scrubber, rate: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rounds = 0  #: over all that was there
        self._moves = moves
        self._scrubber = scrubber
        self._rate = rate
        self._clock = clock
        self._round: Scrub | None = None
        self._due = 0.0
        self._at = clock()

    def turn(self) -> None:
        """Read what the time since the last turn allows, of one second at most: it does not catch up."""
        now = self._clock()
        self._due = min(self._due + self._rate * (now - self._at), float(self._rate))
        self._at = now
        while self._due > 0 and self._clock() < now + TURN_S:
            if self._round is None:
                if not self._moves.ssd.inventory.arena.slabs:
                    return
                self._round = Scrub(self._moves.ssd.inventory, self._moves.ssd.leases, self._moves)
            read = self._scrubber.one(self._round)
            if read is None:
                self.rounds += self._round.blocks > 0
                self._round = None
                return
            self._due -= read[0]

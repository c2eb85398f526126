"""Whether a load should run beside the forward pass that needs it, or before it: from what was measured of both.

Beside it, a request's first token comes sooner by the shorter of the two, as far as the forward pass does not stand
still for the load; and the whole step stands still when it does. If the load fails, the forward pass was for nothing.
"""

from __future__ import annotations

from typing import Final

from kvstrata.engine_adapter.connector.config import LoadPolicy

#: Weight of the newest load in the share of loads' time for which forward passes stood still.
WAITED_WEIGHT: Final = 0.2
#: Loads that are waited for longer than this share of their time bring nothing: they come whole.
WAITED_MAX: Final = 0.6
#: After so many refusals for that reason one is tried again.
RETRY_DECISIONS: Final = 64
#: A load may take so much of the time that computing the rest takes: a longer one would hold up the others.
LOAD_SHARE_MAX: Final = 1.0


class LoadBeside:
    """``waited_share``: of the time of layered loads, lately, the part for which the forward pass stood still."""

    def __init__(self, policy: LoadPolicy) -> None:
        self.policy = policy
        self.waited_share = 0.0
        self._known = False
        self._refused = 0

    def choose(self, load_s: float, compute_s: float, load_yield: float) -> bool:
        """``load_s``, ``compute_s``: of the load and of the rest of the step, 0 where not known. ``load_yield``: the
        share of tokens that loads bring."""
        if self.policy != "auto":
            return self.policy == "always"
        if load_s <= 0.0 or compute_s <= 0.0 or load_s > LOAD_SHARE_MAX * compute_s:
            return False
        share = min(self.waited_share, WAITED_MAX)
        if load_yield * (1.0 - share) * load_s <= (1.0 - load_yield) * compute_s:
            return False
        if self.waited_share < WAITED_MAX:
            return True
        self._refused += 1
        if self._refused < RETRY_DECISIONS:
            return False
        self._refused = 0
        return True

    def ended(self, load_s: float, waited_s: float) -> None:
        """A layered load took ``load_s``, and the forward pass stood still for ``waited_s`` of it."""
        if load_s <= 0.0:
            return
        share = min(1.0, max(0.0, waited_s) / load_s)
        weight = WAITED_WEIGHT if self._known else 1.0
        self._known = True
        self.waited_share += weight * (share - self.waited_share)

    def check(self) -> None:
        """Assert that the share is one."""
        assert 0.0 <= self.waited_share <= 1.0 and 0 <= self._refused < RETRY_DECISIONS

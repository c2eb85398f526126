"""Stores that travel beside the forward pass that makes them: a range of layers goes when it is written.

::

    forward pass     write 0 | attend 0 | write 1 | ...            | write n | attend n | token
    store thread               layers 0 to k | ...                            | the last ones | committed

So what is left to do when the step ends is the last range. A store that the forward pass keeps for too long is given
up, and made as any other when the step has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvstrata.engine_adapter.connector.layered import LayerRanges
from kvstrata.engine_adapter.connector.layout import PoolLayout

if TYPE_CHECKING:
    from kvstrata.engine_adapter.connector.outbox import OpenJob

#: Ranges of a store at most: each is a round trip to a node.
RANGES_MAX: Final = 8
#: Less than this goes as quickly when the step has ended.
BYTES_MIN: Final = 8 << 20
#: It is one call, with the time of one: more than this goes in several, when the step has ended.
BYTES_MAX: Final = 128 << 20
#: A store waits for a step so long at most: its slots are taken meanwhile.
WAIT_MAX_S: Final = 5.0


class LayeredStore:
    """How far the forward pass has come with one store's pages. Thread-safe.

    ``wait_s``: what a call may spend waiting for it in all. ``over``: the step has ended, all is written.
    ``given_up``: a call did not get what it waited for.
    """

    def __init__(self, ranges: LayerRanges, wait_s: float) -> None:
        self.ranges = ranges
        self.over = False
        self.given_up = False
        self._until = time.monotonic() + wait_s
        self._last = last_layers(ranges)
        self._changed = threading.Condition()
        self._layers = 0  # the first ones, that are written

    def layer_written(self, layer: int) -> bool:
        """It and those before it are in memory; True when that ends a range."""
        with self._changed:
            self._layers = layer + 1
            if layer not in self._last:
                return False
            self._changed.notify_all()
            return True

    def end(self) -> None:
        """The step has ended: all is in memory."""
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self.given_up = True
            self._changed.notify_all()

    def written(self, part: int, deadline: float) -> bool:
        """Wait until a range is in memory. False, from then on, when it has taken too long."""
        with self._changed:
            left_s = min(deadline, self._until) - time.monotonic()
            self._changed.wait_for(lambda: self._written(part) or self.given_up, max(0.0, left_s))
            if not self._written(part):
                self.given_up = True
            return not self.given_up

    def _written(self, part: int) -> bool:
        return self.over or self._layers > self._last[part]


def last_layers(ranges: LayerRanges) -> list[int]:
    """The last layer, in the order of writing, of each range and those before it."""
    found = [0] * len(ranges.ends)
    for layer, part in enumerate(ranges.of_layer):
        found[part] = layer
    for part in range(1, len(found)):
        found[part] = max(found[part], found[part - 1])
    return found


def largest(jobs: Sequence[OpenJob], layout: PoolLayout, group: int) -> OpenJob | None:
    """The store that it pays most for, of those of the group that is stored by layer; None of small and huge ones."""
    size = layout.block_bytes(group)
    fitting = [
        opened for opened in jobs if len(opened.job.groups) == 1 and BYTES_MIN <= len(opened.status) * size <= BYTES_MAX
    ]
    return max(fitting, key=lambda opened: len(opened.status), default=None)

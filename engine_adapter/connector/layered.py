"""Loads that run beside the forward pass that needs them: it waits for the pages of a layer, not for all of them.

::

    load thread      layer 0 | layer 1 | layer 2 | ...            | checked: the job ends
    forward pass     project | wait | attend 0 | ... | attend 1 | ...           | wait for the end

What a wait says is early news: a lease or a checksum may still take the load back, and then whatever was computed
from it is computed again.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.connector.layout import PoolLayout

#: Ranges of a load at most: each costs a check and a wake-up, some 50 us.
RANGES_MAX: Final = 16
#: A step stands still for its layered loads so long at most, all layers together: others are in it too.
STAND_STILL_S: Final = 0.5


def layered_group(layout: PoolLayout) -> int | None:
    """The group whose loads can come layer by layer, or None: there must be no other one, as groups come in turn."""
    groups = [index for index, group in enumerate(layout.groups) if group.layers]
    return groups[0] if len(groups) == 1 and layout.groups[groups[0]].poolable else None


@dataclass(frozen=True, slots=True)
class LayerRanges:
    """``ends``: of byte ranges of a pool block, ascending. ``of_layer``: the range after which a layer is in place."""

    ends: tuple[int, ...]
    of_layer: tuple[int, ...]

    @classmethod
    def of(cls, layer_ends: Sequence[int], ranges_max: int = RANGES_MAX) -> LayerRanges:
        """``layer_ends``: where each layer's pages end in a block. Layers that share pages have one end."""
        distinct = sorted(set(layer_ends))
        step = -(-len(distinct) // ranges_max)
        ends = distinct[step - 1 :: step]
        if ends[-1] != distinct[-1]:
            ends.append(distinct[-1])
        return cls(tuple(ends), tuple(bisect_left(ends, end) for end in layer_ends))


class LayeredLoad:
    """How far one load has come. Thread-safe."""

    def __init__(self, ranges: LayerRanges) -> None:
        self.ranges = ranges
        self._changed = threading.Condition()
        self._landed = 0  # ranges that are in place
        self._failed = False
        self._ended = False

    def landed(self, part: int, loaded: npt.NDArray[np.bool_]) -> None:
        """Range ``part`` is in place for those of the load's blocks that ``loaded`` (bool[n]) names."""
        with self._changed:
            if loaded.all():
                self._landed = part + 1
            else:
                self._failed = True
            self._changed.notify_all()

    def end(self, *, loaded: bool) -> None:
        """The job is over."""
        with self._changed:
            self._ended = True
            self._failed |= not loaded
            self._changed.notify_all()

    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        """True when the layer's pages are in place; False when they will not be, or not in time."""
        part = self.ranges.of_layer[layer]
        with self._changed:
            self._changed.wait_for(lambda: self._landed > part or self._failed or self._ended, timeout_s)
            return not self._failed and (self._landed > part or self._ended)

    def wait_end(self, timeout_s: float) -> bool:
        """Whether the job ended in time, however."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, timeout_s)


class LayeredLoads:
    """Those of one step. For the thread that computes, which waits for ``stand_still_s`` a step at most."""

    def __init__(self, stand_still_s: float = STAND_STILL_S) -> None:
        self._stand_still_s = stand_still_s
        self._loads: list[LayeredLoad] = []
        self._waited_s = 0.0
        self._missed = False

    def add(self, load: LayeredLoad) -> None:
        self._loads.append(load)

    def wait_layer(self, layer: int) -> bool:
        """See :meth:`WorkerSide.wait_layer`. After a layer that was missed none is waited for: the step is in vain."""
        for load in self._loads:
            self._missed = self._missed or not self._timed(partial(load.wait_layer, layer))
        return not self._missed

    def miss(self) -> None:
        """A load of the step will not tell of its layers."""
        self._missed = True

    def wait_ends(self) -> None:
        """Their jobs are over, or late; the step has nothing to do with them any more."""
        for load in self._loads:
            self._timed(load.wait_end)
        self._loads = []

    def take_waited_s(self) -> float:
        """How long this thread has waited since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def take_missed(self) -> bool:
        """Whether any layer was not in place when it was read since the last call, however the loads ended."""
        missed, self._missed = self._missed, False
        return missed

    def _timed(self, wait: Callable[[float], bool]) -> bool:
        started = time.monotonic()
        good = wait(max(0.0, self._stand_still_s - self._waited_s))
        self._waited_s += time.monotonic() - started
        return good

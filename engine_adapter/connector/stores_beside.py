"""One store a step that begins before the step has ended, in a thread of its own: others do not wait for layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata.engine_adapter.connector.layered import LayerRanges
from kvstrata.engine_adapter.connector.layered_store import LayeredStore, largest, last_layers
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.outbox import OpenJob
from kvstrata.engine_adapter.connector.workers import Workers

THREADS: Final = 1


class StoresBeside:
    """``begin`` is told of a store that begins now: it is this object's. ``run`` carries it out, and is False when the
    forward pass took too long for it: ``again`` gets it then.

    ``choose``, ``layer_written`` and ``step_ended`` are called by the thread that computes. ``wait_s``: what a store
    may spend waiting for it; ``bound_s``: what it takes at most.
    """

    def __init__(
        self,
        layout: PoolLayout,
        group: int,
        ranges: LayerRanges,
        begin: Callable[[OpenJob], None],
        run: Callable[[OpenJob], bool],
        again: Callable[[OpenJob], None],
        *,
        wait_s: float,
        bound_s: float,
    ) -> None:
        self._layout = layout
        self._group = group
        self._ranges = ranges
        self._ends = frozenset(last_layers(ranges))
        self._begin = begin
        self._run = run
        self._again = again
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._chosen: OpenJob | None = None
        self._begun: OpenJob | None = None  # given to the thread, which has not ended it
        self._taken = False  # by the thread
        self._closed = False
        self._stats = {"stores_beside": 0.0, "stores_beside_given_up": 0.0}
        self.workers = Workers("connector-store-beside", THREADS, self._step, bound_s=bound_s)

    def choose(self, jobs: Sequence[OpenJob]) -> None:
        """The step's stores: one of them may begin when the first of its layers are written."""
        with self._lock:
            idle = self._begun is None and not self._closed
        self._chosen = largest(jobs, self._layout, self._group) if idle and jobs else None

    def layer_written(self, layer: int) -> None:
        """See :meth:`WorkerSide.layer_written`."""
        opened = self._chosen
        if opened is None:
            under_way = self._under_way()
            if under_way is not None:
                under_way.layer_written(layer)
            return
        if layer not in self._ends:
            return
        self._chosen, writing = None, LayeredStore(self._ranges, self._wait_s)
        writing.layer_written(layer)
        with self._lock:
            if self._closed:
                return
            self._begin(opened)
            opened.writing = writing
            self._begun, self._taken = opened, False
            self._stats["stores_beside"] += 1
        self.workers.wake()

    def step_ended(self) -> None:
        """All is written."""
        self._chosen = None
        under_way = self._under_way()
        if under_way is not None:
            under_way.end()

    def close(self) -> OpenJob | None:
        """No store begins any more, and the one under way waits for no layer. Returns one that nobody carries out."""
        with self._lock:
            self._closed = True
            left = self._begun if not self._taken else None
            if left is not None:
                self._begun = None
        under_way = self._under_way()
        if under_way is not None:
            under_way.give_up()
        return left

    def stats(self) -> dict[str, float]:
        """How many began beside a step, and how many of those were made as any other after all, since the start."""
        with self._lock:
            return dict(self._stats)

    def _under_way(self) -> LayeredStore | None:
        begun = self._begun  # the thread may let go of both
        return begun.writing if begun is not None else None

    def _step(self) -> bool:
        with self._lock:
            opened = self._begun if not self._taken else None
            self._taken = self._taken or opened is not None
        if opened is None:
            return False
        ended = True
        try:
            ended = self._run(opened)
            if not ended:
                self._again(opened)  # before another can begin: it asks whether this one's step has ended
        finally:
            with self._lock:
                self._begun = None
                self._stats["stores_beside_given_up"] += not ended
        return True

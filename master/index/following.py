"""A reader of the directory's log, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from kvstrata.master.hub import Hub
from kvstrata.master.index.log import Entry
from kvstrata.master.messages import NodeFacts
from kvstrata.master.namespaces import Group

#: Read at a time.
ENTRIES_MAX: Final = 512
BYTES_MAX: Final = 1 << 20


class Follower:
    """Reads the log from where it is told; see :func:`following`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._bell = threading.Event()

    def join(self) -> None:
        self._hub.read(lambda state, now: state.index.join(self._bell))

    def leave(self) -> None:
        self._hub.read(lambda state, now: state.index.leave(self._bell, now))

    def sequence(self) -> int:
        """The number of the last entry."""
        return self._hub.read(lambda state, now: state.index.sequence)

    def nodes(self) -> Mapping[int, NodeFacts]:
        return self._hub.read(lambda state, now: state.index.nodes())

    def group(self, number: int) -> Group | None:
        return self._hub.read(lambda state, now: state.index.group(number))

    def since(self, sequence: int) -> list[Entry] | None:
        """Some of the entries after ``sequence``; None when they are gone."""
        self._bell.clear()
        return self._hub.read(lambda state, now: state.index.since(sequence, ENTRIES_MAX, BYTES_MAX))

    def wait(self, timeout_s: float) -> None:
        """Return when there is something that the last :meth:`since` did not see, or in ``timeout_s``."""
        self._bell.wait(timeout_s)


@contextmanager
def following(hub: Hub) -> Iterator[Follower]:
    """A follower; the log is written meanwhile."""
    follower = Follower(hub)
    follower.join()
    try:
        yield follower
    finally:
        follower.leave()

"""Prefetch: blocks located, marked as used, and read from SSD into memory ahead of a load that will want them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec.structs import replace

from kvstrata.client.asked import Asked
from kvstrata.client.fanout import Fanout
from kvstrata.client.looking import Looker, nothing_asked
from kvstrata.client.peers import Peers
from kvstrata.client.plan import Part, by_node, positions_of
from kvstrata.client.results import Lookup
from kvstrata.client.traced import told_lookup
from kvstrata.client.transfers import Transfer
from kvstrata.proto.errors import Closed, Forbidden, KVError, Unauthenticated, VersionMismatch
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Endpoint
from kvstrata.transfer.tracing import TRACING

log = get_logger(__name__)

_IN_FLIGHT: Final = int(BlockStatus.IN_FLIGHT)
_NO_ROOM: Final = int(BlockStatus.NO_ROOM)
#: Refusals of the whole call. A node of an earlier version knows no prefetch: that is none.
_WHOLE_CALL: Final = (Unauthenticated, Forbidden, VersionMismatch, Closed)
#: Nodes are asked whether their reads have ended after the first pause, then after ever longer ones.
PAUSE_S: Final = 0.002
PAUSE_MAX_S: Final = 0.05


@dataclass(slots=True)
class Begun:
    """A prefetch that nodes have been told of. ``reading``: by node, parts whose blocks are not all in memory.
    ``trace``: its span, for what nodes are asked later."""

    asked: Asked
    found: Lookup
    reading: list[tuple[Endpoint, list[Part]]] = field(default_factory=list)
    trace: str = ""

    @classmethod
    def shed(cls, asked: Asked) -> Begun:
        """One that was not begun: too much is under way."""
        return cls(asked, nothing_asked(answered=False))

    def settled(self, deadline: float | None = None) -> bool:
        """Always: it names no memory of the caller's."""
        return True


class Prefetcher:
    """Thread-safe: all state of a prefetch is in its own :class:`Begun`."""

    def __init__(self, looker: Looker, peers: Peers, fanout: Fanout) -> None:
        self._looker = looker
        self._peers = peers
        self._fanout = fanout

    def begin(self, asked: Asked, started: float) -> Begun:
        """Look the blocks up and tell each node that holds some of the hit prefix.

        Raises only refusals of the whole call.
        """
        with TRACING.span("kvstrata.prefetch") as span:
            begun = self._begin(asked, started)
            if span.recording:
                told_lookup(span, asked.namespace, asked.salt, begun.found, "")
            return begun

    def _begin(self, asked: Asked, started: float) -> Begun:
        found, located = self._looker.locate(asked.namespace, asked.salt, asked.hashes, started, asked.deadline)
        begun = Begun(asked, found, trace=TRACING.here())
        hit = found.hit_blocks or 0
        if located is not None and hit:
            prefix = replace(asked, hashes=asked.hashes[: hit * asked.namespace.hash_bytes], count=hit)
            begun.asked = prefix
            groups = by_node(located.codes[:hit], None, prefix.limit)
            begun.reading = [(located.nodes[parts[0].node], parts) for parts in groups]
            self.ask(begun)
        return begun

    def ask(self, begun: Begun) -> None:
        """Ask every node once for what is not in memory yet; ``begun.reading`` is what remains."""
        calls = [partial(self._ask_node, begun.asked, node, parts) for node, parts in begun.reading]
        with TRACING.under(begun.trace):
            left = self._fanout.run(calls)
        begun.reading = [(node, parts) for (node, _), parts in zip(begun.reading, left, strict=True) if parts]

    def _ask_node(self, asked: Asked, node: Endpoint, parts: list[Part]) -> list[Part]:
        """Parts of those blocks that the node is reading, or could not begin to. A node that fails has none: the
        load itself will find out."""
        peer = self._peers.get(node)
        left: list[Part] = []
        for part in parts if peer is not None else ():
            positions = positions_of(part.where)
            try:
                assert peer is not None
                status = peer.prefetch(asked.named(positions))
            except _WHOLE_CALL:
                raise
            except KVError as error:
                log.debug("prefetch failed", node=node.node_id, reason=f"{type(error).__name__}: {error}")
                return []
            reading = positions[(status == _IN_FLIGHT) | (status == _NO_ROOM)]
            if len(reading):
                left.append(Part(part.node, reading))
        return left


class Prefetch:
    """Blocks being made ready for a load: located, marked as used, and read into memory where they were on SSD.

    Nodes read in the background whether or not somebody waits. It holds no memory of the caller's and no lease:
    what it brought may be evicted again before the load.
    """

    def __init__(self, future: Future[Begun], deadline: float, ask: Callable[[Begun], None]) -> None:
        self._transfer = Transfer(future, deadline)
        self._future = future
        self._deadline = deadline
        self._ask = ask

    def wait(self, deadline: float | None = None) -> Lookup | None:
        """What the directory said, once the blocks are in memory; None when they are not by ``deadline``
        (monotonic seconds; default: the call's own), or it was cancelled. Raises what a lookup would have raised.
        """
        until = self._deadline if deadline is None else deadline
        if self._future.cancelled() or not self._transfer.wait(deadline):
            return None
        begun, pause = self._future.result(), PAUSE_S
        while begun.reading:
            if time.monotonic() + pause > until:
                return None
            time.sleep(pause)
            self._ask(begun)
            pause = min(2 * pause, PAUSE_MAX_S)
        return begun.found

    def done(self) -> bool:
        """True once the nodes have been told, or it was cancelled; they may be reading still."""
        return self._future.done()

    def cancel(self) -> bool:
        """Give it up if it has not begun; True when it will not run."""
        return self._future.cancel()

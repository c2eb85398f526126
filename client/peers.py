"""The nodes a client knows: one peer for each, of the newest incarnation it has heard of."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvstrata.client.directory import AVOID_MAX
from kvstrata.proto.errors import Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.base import Endpoint, Peer
from kvstrata.transfer.link import NodeLink

log = get_logger(__name__)

#: Nodes with open peers; past it, the one heard of first is let go.
PEERS_MAX: Final = 1024


@dataclass(slots=True)
class Known:
    """A node, and the way to it. ``peer`` is None when no transport reaches it (``problem`` says why)."""

    endpoint: Endpoint
    peer: Peer | None
    problem: str = ""


class Peers:
    """Thread-safe. Peers that were replaced or let go are closed by :meth:`close_retired`, not by callers."""

    def __init__(self, connect: Callable[[Endpoint], Peer], boot_id: str, *, peers_max: int = PEERS_MAX) -> None:
        self.boot_id = boot_id
        self._connect = connect
        self._peers_max = peers_max
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._retired: list[Peer] = []
        self._lock = threading.Lock()
        self._local: Peer | None = None
        self._next_lost = 0
        self._lost: tuple[Endpoint, ...] = ()
        self._closed = False
        self._opens_before = 0  #: of peers that are closed

    def get(self, endpoint: Endpoint) -> Peer | None:
        """The peer of exactly this incarnation, made when new; None when it is gone or out of reach."""
        known = self._known.get(endpoint.node_id)
        if known is not None and (known.endpoint is endpoint or known.endpoint == endpoint):
            return known.peer
        return self._learn(endpoint)

    def sole_local(self) -> Peer | None:
        """The node on this host, when exactly one is known here and reachable."""
        return self._local

    def all(self) -> list[Known]:
        with self._lock:
            return list(self._known.values())

    def any_reachable(self) -> bool:
        return any(known.peer is not None and known.peer.reachable() for known in self.all())

    def lost(self) -> tuple[Endpoint, ...]:
        """Nodes that were out of reach when last seen to, at most ``AVOID_MAX``."""
        return self._lost

    def avoiding(self, nodes: Iterable[Endpoint]) -> list[Endpoint]:
        """These and those out of reach, each once, at most ``AVOID_MAX``: what a question asks to avoid."""
        return list(dict.fromkeys([*nodes, *self._lost]))[:AVOID_MAX]

    def lose(self, node: Endpoint) -> None:
        """A call found this node out of reach: so it is until the next upkeep has looked."""
        if node not in self._lost:
            self._lost = (node, *self._lost)[:AVOID_MAX]

    def _learn(self, endpoint: Endpoint) -> Peer | None:
        with self._lock:
            known = self._known.get(endpoint.node_id)
            if known is not None:
                if known.endpoint == endpoint:
                    return known.peer
                if known.endpoint.incarnation > endpoint.incarnation:
                    return None  # named by an old answer: those blocks are gone
            if self._closed:
                return None
            return self._add(endpoint)

    def _add(self, endpoint: Endpoint) -> Peer | None:
        """Connect (no byte is sent yet) and keep; the lock is held."""
        peer, problem = None, ""
        try:
            peer = self._connect(endpoint)
        except Unavailable as error:
            problem = str(error)
            log.warning("node out of reach", node=endpoint.node_id, reason=problem)
        old = self._known.pop(endpoint.node_id, None)
        if old is not None and old.peer is not None:
            self._retired.append(old.peer)
        self._known[endpoint.node_id] = Known(endpoint, peer, problem)
        while len(self._known) > self._peers_max:
            _, dropped = self._known.popitem(last=False)
            if dropped.peer is not None:
                self._retired.append(dropped.peer)
        self._find_local()
        return peer

    def _find_local(self) -> None:
        here = [
            known.peer
            for known in self._known.values()
            if known.endpoint.boot_id == self.boot_id and known.peer is not None and known.peer.reachable()
        ]
        self._local = here[0] if len(here) == 1 else None

    def upkeep(self, budget_s: float) -> None:
        """One turn for every peer: reachable ones first; unreachable ones until ``budget_s`` is spent.

        A peer that got no turn is the first to get one next time. A peer's error is raised after all turns.
        """
        until = time.monotonic() + budget_s
        with self._lock:
            self._find_local()
            peers = [known.peer for known in self._known.values() if known.peer is not None]
            known_now = self._known.values()
            away = (known.endpoint for known in known_now if known.peer is None or not known.peer.reachable())
            self._lost = tuple(islice(away, AVOID_MAX))
        problem: Exception | None = None
        lost = [peer for peer in peers if not peer.reachable()]
        turns = [peer for peer in peers if peer.reachable()]
        turns += [lost[(self._next_lost + step) % len(lost)] for step in range(len(lost))]
        for peer in turns:
            if time.monotonic() > until and not peer.reachable():
                break
            self._next_lost += not peer.reachable()
            try:
                peer.upkeep()
            except Exception as error:  # noqa: BLE001  the other peers get their turn first; then it is raised
                problem = error
        if problem is not None:
            raise problem

    def close_retired(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, []
        for peer in retired:
            self._opens_before += _opens(peer)
            peer.close()

    def breaker_opens(self) -> int:
        """Times that a node was found silent or gone."""
        return self._opens_before + sum(_opens(known.peer) for known in self.all())

    def close(self) -> None:
        """Close all; nothing is connected any more."""
        with self._lock:
            self._closed = True
            self._retired.extend(known.peer for known in self._known.values() if known.peer is not None)
            self._known.clear()
            self._local = None
        self.close_retired()


def _opens(peer: object) -> int:
    """Of the peer's own link, whatever is put in front of it."""
    while peer is not None:
        link = getattr(peer, "link", None)
        if isinstance(link, NodeLink):
            return link.channel.breaker.opened
        peer = getattr(peer, "inner", None)
    return 0

"""Hints: what a caller knows of its blocks' future, told to the nodes that hold them. Best effort."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from kvstrata.client.asked import Asked
from kvstrata.client.fanout import Fanout
from kvstrata.client.locations import Hint, RecentLocations
from kvstrata.client.looking import Looker
from kvstrata.client.outcomes import WHOLE_CALL
from kvstrata.client.peers import Peers
from kvstrata.client.plan import Part, by_node, positions_of
from kvstrata.proto.errors import InvalidArgument, KVError
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import HintKind
from kvstrata.transfer.base import Endpoint

log = get_logger(__name__)

#: Nobody keeps a block for longer without saying so again.
TTL_S_MAX: Final = 86_400.0


def checked_ttl(ttl_s: float) -> float:
    """Raises :class:`InvalidArgument` for what is no time, or longer than a day."""
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float | np.number) or not 0 < ttl_s <= TTL_S_MAX:
        raise InvalidArgument(f"ttl_s is {ttl_s!r}: expected seconds, more than 0 and at most {TTL_S_MAX:.0f}")
    return float(ttl_s)


class Hinter:
    """Thread-safe."""

    def __init__(self, looker: Looker, recent: RecentLocations, peers: Peers, fanout: Fanout) -> None:
        self._looker = looker
        self._recent = recent
        self._peers = peers
        self._fanout = fanout

    def hint(self, asked: Asked, kind: HintKind, ttl_s: float, started: float) -> int:
        """Blocks that nodes moved for it; 0 also when nobody could be told. Raises refusals of the whole call."""
        where = self._where(asked, started)
        if where is None:
            return 0
        codes, nodes, _ = where
        groups = by_node(codes, None, asked.limit)
        return sum(self._fanout.run([partial(self._tell, asked, kind, ttl_s, nodes[g[0].node], g) for g in groups]))

    def _where(self, asked: Asked, started: float) -> Hint | None:
        known = self._recent.find(asked.namespace, asked.salt, asked.hashes, epoch=asked.namespace.epoch)
        if known is not None and known[0].all():
            return known
        _, located = self._looker.locate(asked.namespace, asked.salt, asked.hashes, started, asked.deadline)
        return known if located is None else Hint(located.codes, located.nodes, located.replicas)

    def _tell(self, asked: Asked, kind: HintKind, ttl_s: float, node: Endpoint, parts: list[Part]) -> int:
        peer, moved = self._peers.get(node), 0
        for part in parts if peer is not None else ():
            try:
                assert peer is not None
                moved += peer.hint(asked.named(positions_of(part.where)), kind, ttl_s)
            except WHOLE_CALL:
                raise
            except KVError as error:
                log.debug("hint not told", node=node.node_id, reason=f"{type(error).__name__}: {error}")
                break
        return moved

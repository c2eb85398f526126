"""A peer in front of another one: what it does not do itself, that one does."""

from __future__ import annotations

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import HintKind
from kvstrata.transfer.base import Endpoint, Lease, Named, Peer, StatusArray


class PeerInFront:
    """Of ``inner``, whose endpoint and transport it has. ``fetch`` and ``push`` are the subclass's."""

    def __init__(self, inner: Peer) -> None:
        self.inner = inner
        self.endpoint: Endpoint = inner.endpoint

    @property
    def transport(self) -> str:
        return self.inner.transport

    def view(self, namespace: Namespace, salt: str, hashes: bytes, deadline: float, epoch: int = 0) -> Lease:
        return self.inner.view(namespace, salt, hashes, deadline, epoch)

    def prefetch(self, blocks: Named) -> StatusArray:
        return self.inner.prefetch(blocks)

    def hint(self, blocks: Named, kind: HintKind, ttl_s: float) -> int:
        return self.inner.hint(blocks, kind, ttl_s)

    def reachable(self) -> bool:
        return self.inner.reachable()

    def upkeep(self) -> None:
        self.inner.upkeep()

    def close(self) -> None:
        self.inner.close()

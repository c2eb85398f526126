"""Pages in the pool: asked for, loaded, stored. Whatever is wrong with the pool is a miss here, never an exception."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstrata.client import BlockStatus, LoadResult, PoolNamespace, StoreResult
from kvstrata.engine_adapter.connector.pool_client import BlockClient
from kvstrata.engine_adapter.sglang.host_pages import HostPages, Indices
from kvstrata.engine_adapter.sglang.page_keys import page_hash, page_hashes
from kvstrata.proto.errors import KVError
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.regions import Region

log = get_logger(__name__)

#: How often it is said that pages are still in use.
STILL_S: Final = 5.0


class PageStore:
    """Pages of one host pool, by SGLang's names of them. Thread-safe as far as the client is.

    All of it is under the empty salt: a tenant's salt is part of the names already.
    """

    def __init__(self, client: BlockClient, namespace: PoolNamespace, region: Region, pages: HostPages) -> None:
        self._client, self._namespace, self._region, self._pages = client, namespace, region, pages

    def hit_pages(self, keys: Sequence[str]) -> int:
        """Length of the prefix of ``keys`` that every rank's shard has. 0 when nobody can be asked."""
        if not keys:
            return 0
        try:
            return self._client.lookup(self._namespace, "", page_hashes(keys)).hit_blocks or 0
        except KVError as error:
            log.warning("pages_not_looked_up", pages=len(keys), error=str(error))
            return 0

    def load(self, keys: Sequence[str], indices: Indices) -> list[bool]:
        """Read each page into its slots; where False, they may hold garbage."""
        if not keys:
            return []
        try:
            blocks = self._region.view(self._namespace, self._pages.offsets(indices))
            result = self._client.load(self._namespace, "", page_hashes(keys), blocks)
        except KVError as error:
            log.warning("pages_not_loaded", pages=len(keys), error=str(error))
            return [False] * len(keys)
        _wait(result)
        return list(map(bool, result.loaded))

    def store(self, keys: Sequence[str], indices: Indices, before: Sequence[str] = ()) -> list[bool]:
        """Offer each page; ``before`` are the names before the first in its chain, as far as they are known.

        True also where another writer is storing the page now: SGLang gives up the rest of a chain at the first False.
        """
        if not keys:
            return []
        try:
            blocks = self._region.view(self._namespace, self._pages.offsets(indices))
            parent = page_hash(before[-1]) if before else None
            result = self._client.store(self._namespace, "", page_hashes(keys), blocks, parent, len(before))
        except KVError as error:
            log.warning("pages_not_stored", pages=len(keys), error=str(error))
            return [False] * len(keys)
        _wait(result)
        done: list[bool] = np.logical_or(result.stored, result.status == BlockStatus.IN_FLIGHT).tolist()
        return done


def _wait(result: LoadResult | StoreResult) -> None:
    """Until no one-sided transfer touches the pages any more. SGLang takes them back when a call returns, and has no
    way to be told to wait: a thread of its that stands still is better than pages that change under it."""
    while not result.settled(time.monotonic() + STILL_S):
        log.error(
            "pages_in_use", reason="a node stands still in the middle of a transfer; waiting for it to go on or die"
        )

"""The embedded client of a kvstrata pool. See :class:`Client`; ``kvstrata.client.aio`` is its async face."""

from kvstrata.client.client import Client
from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.prefetching import Prefetch
from kvstrata.client.results import NO_TIER, LoadResult, Lookup, RemoveResult, StoreResult
from kvstrata.client.transfers import Transfer, TransferState
from kvstrata.client.view import View
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.transfer.regions import BlockView, Region

__all__ = [
    "NO_TIER",
    "BlockStatus",
    "BlockView",
    "Client",
    "LoadResult",
    "Lookup",
    "PoolNamespace",
    "Prefetch",
    "Region",
    "RemoveResult",
    "StoreResult",
    "Tier",
    "Transfer",
    "TransferState",
    "View",
]

"""The embedded client of a kvstrata pool. See :class:`Client`; ``kvstrata.client.aio`` is its async face.

Names are imported when they are asked for: what needs a part of this package, as the command line does, does not
load all of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvstrata.client.client import Client
    from kvstrata.client.namespace import PoolNamespace
    from kvstrata.client.prefetching import Prefetch
    from kvstrata.client.results import NO_TIER, LoadResult, Lookup, RemoveResult, StoreResult
    from kvstrata.client.transfers import Transfer, TransferState
    from kvstrata.client.view import View
    from kvstrata.proto.status import BlockStatus, Tier
    from kvstrata.transfer.regions import BlockView, Region

_HOMES: Final = {
    "NO_TIER": "client.results",
    "BlockStatus": "proto.status",
    "BlockView": "transfer.regions",
    "Client": "client.client",
    "LoadResult": "client.results",
    "Lookup": "client.results",
    "PoolNamespace": "client.namespace",
    "Prefetch": "client.prefetching",
    "Region": "transfer.regions",
    "RemoveResult": "client.results",
    "StoreResult": "client.results",
    "Tier": "proto.status",
    "Transfer": "client.transfers",
    "TransferState": "client.transfers",
    "View": "client.view",
}

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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"kvstrata.{home}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

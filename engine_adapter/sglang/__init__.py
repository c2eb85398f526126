"""The storage backend for SGLang's hierarchical cache (HiCache), loaded by it from outside of its tree.

::

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvstrata", "class_name": "KVStrataStorage",
        "module_path": "kvstrata.engine_adapter.sglang", "interface_v1": 1,
        "kvstrata": {"masters": "127.0.0.1:7400"}}'

A page of SGLang's host cache is a block of the pool. SGLang and torch are imported when the class is asked for, so that
the other modules can be used and tested without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstrata.engine_adapter.sglang.storage import KVStrataStorage

__all__ = ["KVStrataStorage"]


def __getattr__(name: str) -> object:
    if name != "KVStrataStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import sglang  # noqa: F401
    except ImportError as error:
        raise ImportError(f"KVStrataStorage needs SGLang 0.5.23 or newer: {error}") from error
    try:
        from kvstrata.engine_adapter.sglang import storage
    except ImportError as error:
        raise ImportError(f"this SGLang has another storage interface than 0.5.23 and newer: {error}") from error
    return storage.KVStrataStorage

"""The connector for vLLM, loaded by it from outside of its tree.

::

    --kv-transfer-config '{"kv_connector": "KVStrataConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "kvstrata.engine_adapter.vllm",
                           "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"masters": "127.0.0.1:7400"}}'

Both halves are the ones of ``engine_adapter/connector``; here is only what makes vLLM's objects theirs. vLLM and torch
are imported when the class is asked for, so that the other modules can be used and tested without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstrata.engine_adapter.vllm.connector import KVStrataConnector

__all__ = ["KVStrataConnector"]


def __getattr__(name: str) -> object:
    if name != "KVStrataConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError("KVStrataConnector needs vLLM 0.30 or newer: pip install 'kvstrata[vllm]'") from error
    try:
        from kvstrata.engine_adapter.vllm import connector
    except ImportError as error:
        raise ImportError(f"this vLLM has another connector interface than 0.30 and newer: {error}") from error
    _register(name)
    return connector.KVStrataConnector


def _register(name: str) -> None:
    """MultiConnector looks the statistics of its children up by name, also of those that were loaded by a path."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, __name__, name)

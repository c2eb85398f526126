"""vLLM's request, as the scheduler side reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvstrata.engine_adapter.vllm.adapters import Adapter, AdapterHashes
from kvstrata.transfer.tracing import TRACE_CHARACTERS_MAX


class VllmRequest(Protocol):
    """What is read of ``vllm.v1.request.Request``."""

    request_id: str
    cache_salt: str | None
    lora_request: Adapter | None
    trace_headers: Mapping[str, str] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: list[bytes]

    @property
    def num_tokens(self) -> int: ...
    @property
    def skip_reading_prefix_cache(self) -> bool | None: ...


class RequestView:
    """A :class:`~kvstrata.engine_adapter.connector.base.ConnectorRequest` over vLLM's. ``preemptions``: how many of
    them the scheduler side knows of. ``adapter``: digest of its LoRA adapter, empty without one."""

    __slots__ = ("_adapter", "preemptions", "request", "trace")

    def __init__(self, request: VllmRequest, adapter: bytes = b"") -> None:
        self.request = request
        self._adapter = AdapterHashes(adapter) if adapter else None
        self.preemptions = request.num_preemptions
        headers = request.trace_headers
        self.trace = headers.get("traceparent", "")[:TRACE_CHARACTERS_MAX] if headers else ""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def cache_salt(self) -> str:
        return self.request.cache_salt or ""

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.request.num_computed_tokens

    @property
    def block_hashes(self) -> Sequence[bytes]:
        hashes = self.request.block_hashes
        return self._adapter.keyed(hashes) if self._adapter is not None else hashes

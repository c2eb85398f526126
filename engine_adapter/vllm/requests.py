"""vLLM's request, as the scheduler side reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class VllmRequest(Protocol):
    """What is read of ``vllm.v1.request.Request``."""

    request_id: str
    cache_salt: str | None
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
    them the scheduler side knows of."""

    __slots__ = ("preemptions", "request")

    def __init__(self, request: VllmRequest) -> None:
        self.request = request
        self.preemptions = request.num_preemptions

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
        return self.request.block_hashes

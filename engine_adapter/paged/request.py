"""A request as the engine keeps it: its tokens, how far they are computed, and the hashes of its full blocks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import check_salt


class RequestStatus(IntEnum):
    """Where a request is. Everything from ``STOPPED`` on is final."""

    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1  #: a load from the pool is under way into blocks it already holds
    RUNNING = 2
    PREEMPTED = 3  #: lost its blocks; waits to be computed again
    STOPPED = 4  #: a stop token
    LENGTH = 5  #: ``max_tokens`` or the model's length
    ABORTED = 6  #: by the caller
    REJECTED = 7  #: can never fit

    @property
    def finished(self) -> bool:
        return self >= RequestStatus.STOPPED


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. ``temperature`` 0 is greedy; otherwise draws depend on ``seed`` and position only."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  #: 0: all
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0  #: how many alternatives to report a token; 0: none

    def validated(self) -> SamplingParams:
        """Return self, or raise :class:`InvalidArgument` naming the field and its bound."""
        for name, good, bound in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("seed", 0 <= self.seed < 1 << 64, "an unsigned 64-bit integer"),
            ("logprobs", 0 <= self.logprobs <= 20, "0 to 20"),
        ):
            if not good:
                raise InvalidArgument(f"{name} is {getattr(self, name)}: expected {bound}")
        return self


class Request:
    """One request. The scheduler owns it; nothing else changes it.

    ::

        |<----------------- prompt ----------------->|<--- output --->|
        |<- cached locally ->|<- external ->|<- computed here ... ->| |
        |<--------------- num_computed_tokens --------------------->|
        |<---------------------- num_tokens ------------------------->|

    ``block_hashes``: one for each full block of ``num_tokens`` (hash blocks), extended as tokens come.
    ``extra_keys``: anything beyond tokens and salt that changes the KV (a LoRA name, say); part of every hash.
    ``trace``: the caller's W3C traceparent, which the pool's spans for it come under; "" without one.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        hasher: BlockHasher,
        *,
        cache_salt: str = "",
        extra_keys: Sequence[str] = (),
        trace: str = "",
        eos_token_id: int | None = None,
        arrival_s: float = 0.0,
    ) -> None:
        check_salt(cache_salt)
        if not prompt_token_ids:
            raise InvalidArgument("the prompt has no tokens: send at least one")
        self.request_id = request_id
        self.sampling = sampling.validated()
        self.cache_salt = cache_salt
        self.extra_keys = tuple(extra_keys)
        self.trace = trace
        self.eos_token_id = eos_token_id
        self.arrival_s = arrival_s
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids: list[int] = list(prompt_token_ids)
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        #: Tokens found cached when it was first scheduled; None before that. ``num_tokens - 1`` at most.
        self.num_local_cached_tokens: int | None = None
        self.num_external_cached_tokens = 0
        self._hasher = hasher
        self._root = hasher.root(cache_salt, self.extra_keys)
        self.block_hashes: list[bytes] = []
        hasher.extend(self._root, self.block_hashes, self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status.finished

    def append_output(self, token_id: int) -> None:
        """Add one sampled token, and the hash of the block it may have filled."""
        self.token_ids.append(token_id)
        self._hasher.extend(self._root, self.block_hashes, self.token_ids)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens})"
        )

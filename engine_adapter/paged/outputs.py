"""What goes between scheduler and workers in one step. All of it travels as msgpack to worker processes."""

from __future__ import annotations

import msgspec

from kvstrata.engine_adapter.connector.base import ConnectorMeta, ConnectorOutput
from kvstrata.engine_adapter.paged.request import SamplingParams

BlockIds = tuple[list[int], ...]  #: one list a KV cache group


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the workers do not know, or know no longer (resumed after preemption): all of it."""

    request_id: str
    token_ids: list[int]  #: prompt, and output so far
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: BlockIds
    num_computed_tokens: int


class CachedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the workers know: what changed since the last step it was in."""

    request_id: str
    new_token_ids: list[int]  #: sampled tokens that the workers have not been told of
    new_block_ids: BlockIds  #: appended to the block table
    num_computed_tokens: int


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step. ``num_scheduled_tokens``: request id -> tokens to compute, in the order of the batch.

    Tokens ``[num_computed, num_computed + scheduled)`` of each request are computed; a token is sampled for a
    request when that reaches its last known token. ``finished``: forget these. ``preempted``: forget these,
    they may come back as new. Either may be empty; a step with no tokens still carries connector work.
    """

    step_id: int
    new: list[NewRequest] = []
    cached: list[CachedRequest] = []
    num_scheduled_tokens: dict[str, int] = {}
    finished: list[str] = []
    preempted: list[str] = []
    num_common_prefix_blocks: list[int] = []  #: one a group; blocks that every scheduled request starts with
    connector_meta: ConnectorMeta | None = None

    @property
    def total_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of the sampled token and of the likeliest ``n``: (token id, log probability)."""

    sampled: float
    top: list[tuple[int, float]]


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did. ``sampled``: request id -> token, for those whose last token was computed."""

    step_id: int
    sampled: dict[str, int] = {}
    logprobs: dict[str, TokenLogprobs] = {}
    connector: ConnectorOutput | None = None
    compute_s: float = 0.0  #: time in the model, for the prefill rate


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step brought a request's caller."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None  #: "stop", "length", "abort", "error"; None while it goes on
    error: str = ""  #: for "error": what the caller should change
    num_prompt_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = []

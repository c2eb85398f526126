"""Which requests can never be served, so that they are refused when they come."""

from __future__ import annotations

from enum import IntEnum

from kvstrata.engine_adapter.paged.cache.kv_cache_manager import KVCacheManager
from kvstrata.engine_adapter.paged.request import Request


class Admission(IntEnum):
    """What came of a waiting request's turn."""

    RUNS = 0
    LOADS = 1
    NOT_YET = 2  #: the pool has not answered: the next ones may pass
    NO_ROOM = 3  #: no blocks or no tokens left in this step: nobody passes


def tokens_at_most(request: Request, max_model_len: int) -> int:
    """Tokens whose KV the request can ever need. The last one it samples is never computed."""
    return min(request.num_prompt_tokens + request.sampling.max_tokens, max_model_len) - 1


def refusal(request: Request, kv: KVCacheManager, max_model_len: int) -> str:
    """Why the request could never finish, with the numbers; empty when it can, running alone."""
    prompt = request.num_prompt_tokens
    if prompt >= max_model_len:
        return (
            f"the prompt has {prompt} tokens: at most {max_model_len - 1} fit, "
            f"since max_model_len is {max_model_len} and one must be left to generate"
        )
    most = tokens_at_most(request, max_model_len)
    if kv.can_ever_fit(most):
        return ""
    return (
        f"{prompt} prompt tokens and {request.sampling.max_tokens} to generate need {kv.blocks_needed(most)} cache "
        f"blocks, and there are {kv.pool.num_blocks - 1}: shorten the prompt, lower max_tokens, or give more KV memory"
    )

"""How layers become groups, and memory becomes blocks: decided once, when an engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from kvstrata.proto.errors import InvalidArgument


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Groups for a model's layers, ``specs`` one a layer in the model's order.

    A block id stands for one page in every tensor, and there are as many tensors as the largest group has layers.
    A kind with many layers is therefore split into groups of about equal size: 25 sliding-window layers and 5 full
    ones become six groups of 5 over 5 tensors, where two groups would leave 20 of 25 tensors unused by the second.

    Raises :class:`InvalidArgument` when pages differ in bytes, since all groups share the tensors.
    """
    if not specs:
        raise InvalidArgument("the model has no layers that need a KV cache")
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    pages = {spec.page_size_bytes for spec in kinds}
    if len(pages) > 1:
        listed = ", ".join(f"{type(s).__name__} of {s.block_size} tokens: {s.page_size_bytes}" for s in kinds)
        raise InvalidArgument(
            f"all layers share one page size, and theirs differ in bytes ({listed}): choose block sizes that equal out"
        )
    size = _group_size([len(layers) for layers in kinds.values()])
    return tuple(
        KVCacheGroup(layers=tuple(chunk), spec=spec)
        for spec, layers in kinds.items()
        for chunk in _even_chunks(layers, -(-len(layers) // size))
    )


def _group_size(counts: Sequence[int]) -> int:
    """Most layers a group: the size that leaves the fewest unused pages, the largest of those (fewest tables)."""
    return min(range(min(counts), max(counts) + 1), key=lambda size: (sum(-(-n // size) * size for n in counts), -size))


def _even_chunks(layers: Sequence[int], chunks: int) -> list[Sequence[int]]:
    """``layers`` in order, cut into pieces whose lengths differ by one at most."""
    cuts = [len(layers) * index // chunks for index in range(chunks + 1)]
    return [layers[first:end] for first, end in pairwise(cuts)]


def blocks_for_request(groups: Sequence[KVCacheGroup], num_tokens: int, max_num_batched_tokens: int) -> int:
    """Most blocks that one request of ``num_tokens`` holds at a time, over all groups."""
    return sum(group.spec.max_blocks(num_tokens, max_num_batched_tokens) for group in groups)


def plan_kv_cache(
    specs: Sequence[KVCacheSpec],
    *,
    num_blocks: int = 0,
    memory_bytes: int = 0,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> KVCacheConfig:
    """The cache of a rank: ``num_blocks`` ids, or when 0 as many as fit in ``memory_bytes``.

    Raises :class:`InvalidArgument`, with the bytes and the longest length that would fit, when one request of
    ``max_model_len`` tokens does not.
    """
    if max_model_len < 1 or max_num_batched_tokens < 1:
        raise InvalidArgument(
            f"max_model_len is {max_model_len}, max_num_batched_tokens {max_num_batched_tokens}: at least 1 each"
        )
    groups = group_layers(specs)
    block_bytes = max(len(group.layers) for group in groups) * groups[0].spec.page_size_bytes
    given = num_blocks or memory_bytes // block_bytes
    needed = blocks_for_request(groups, max_model_len, max_num_batched_tokens) + 1
    if given < needed:
        bytes_given = given * block_bytes if num_blocks else memory_bytes
        longest = longest_that_fits(groups, given, max_model_len, max_num_batched_tokens)
        raise InvalidArgument(
            f"one request of {max_model_len} tokens needs {needed * block_bytes} bytes of KV cache ({needed} blocks "
            f"of {block_bytes} bytes, the null block included), given are {bytes_given} bytes ({given} blocks): "
            f"give more, or set max_model_len to at most {longest}"
        )
    return KVCacheConfig(
        num_blocks=given,
        groups=groups,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
    ).validated()


def longest_that_fits(
    groups: Sequence[KVCacheGroup], num_blocks: int, max_model_len: int, max_num_batched_tokens: int
) -> int:
    """Most tokens, up to ``max_model_len``, of a request that runs alone in ``num_blocks`` ids; 0 when none does."""
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for_request(groups, middle, max_num_batched_tokens) < num_blocks:
            low = middle
        else:
            high = middle - 1
    return low

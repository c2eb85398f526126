"""Blocks cut by heads, so that engines of different tensor-parallel size share them: how many shards a rank has.

::

    kv_shards 4        heads 0,1    heads 2,3    heads 4,5    heads 6,7
    4 ranks            rank 0       rank 1       rank 2       rank 3         one shard each: what they have without it
    2 ranks            rank 0 ----------------   rank 1 ----------------     two each
    1 rank             rank 0 ------------------------------------------     four
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstrata.proto.errors import InvalidArgument

#: Shards of one rank at most: each is a call of its own, all at once.
SHARDS_PER_RANK_MAX: Final = 16


def shards_per_rank(kv_shards: int, ranks: int, heads: Iterable[int]) -> int:
    """How many shards each of ``ranks`` ranks cuts its heads into, so that there are ``kv_shards`` (0: one a rank).

    ``heads``: KV heads of one rank, an entry a kind of layer that is pooled; 0 for KV without heads. Raises
    :class:`InvalidArgument`, with what to choose instead, when they cannot be cut so.
    """
    if kv_shards in (0, ranks):
        return 1
    if kv_shards < ranks or kv_shards % ranks:
        raise InvalidArgument(
            f"kv_shards is {kv_shards}: expected a multiple of the tensor-parallel size, which is {ranks}: choose the "
            "largest size of the engines that are to share KV, and give it to all of them"
        )
    each = kv_shards // ranks
    for count in heads:
        if count == 0:
            raise InvalidArgument(
                f"kv_shards is {kv_shards}, and KV without heads of its own (MLA's latent) cannot be cut by heads: "
                "leave kv_shards out"
            )
        if count % each:
            raise InvalidArgument(
                f"kv_shards is {kv_shards}: the {count} KV heads of a rank cannot be cut into {each} shards: choose a "
                f"multiple of {ranks} that divides {ranks * count}, or leave kv_shards out"
            )
    if each > SHARDS_PER_RANK_MAX:
        raise InvalidArgument(
            f"kv_shards is {kv_shards}: expected at most {SHARDS_PER_RANK_MAX} for each of {ranks} ranks: "
            "choose the largest tensor-parallel size of the engines that are to share KV"
        )
    return each

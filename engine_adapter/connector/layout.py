"""How one engine's KV memory maps to blocks of the pool: geometry, namespaces, and nothing that moves.

::

    memory of a rank, one buffer:   tensor 0 | tensor 1 | ... | tensor t-1
    a tensor, MHA/GQA:              K of all block ids | V of all block ids
    a tensor, MLA:                  latent of all block ids

    pool block of group g, id b:    for each layer slot i of g:  K page of b in tensor i, V page of b in tensor i

    a page of K or V:               [tokens, heads, head size]
    cut by heads, shard s of b:     for each layer slot, K and V:  for each token its heads of s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.gpu.memory import Buffer
from kvstrata.transfer.regions import PIECES_MAX

Pieces = npt.NDArray[np.int64]


def check_pieces(pieces: int, shards: int) -> None:
    """Raise :class:`InvalidArgument` where a pool block, one of ``shards`` of a rank's, lies in more pieces than a call
    may name: each would be refused, for as long as the engine runs."""
    if pieces > PIECES_MAX:
        cut = "leave kv_shards out, or choose a KV layout with heads before tokens, or " if shards > 1 else "choose "
        raise InvalidArgument(
            f"a block of KV lies in {pieces} pieces, and {PIECES_MAX} is the most that can be pooled: "
            f"{cut}smaller blocks"
        )


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group. ``window_tokens`` 0: a hit needs every block of the prefix; otherwise only those that
    hold the last ``window_tokens - 1`` tokens before the first one to compute. ``poolable`` False: never stored
    (a state or an encoder's KV that a prefix does not determine). ``block_bytes`` of one block on one rank, all of its
    shards; 0: ``layers`` pages, as above."""

    fingerprint: str  #: the namespace group of :meth:`kvstrata.client.Client.namespace`
    block_tokens: int
    layers: int  #: layer slots: tensors 0 to layers - 1
    window_tokens: int = 0
    poolable: bool = True
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockPieces:
    """Where the pieces of a block lie, each of which moves by the same bytes from one block id to the next.

    ``offsets`` of block 0's pieces, ``strides`` from block to block, ``lengths``: int64 [pieces], in bytes. A table of
    all blocks would be larger than what it says: pieces of one token's heads are some hundred bytes.
    """

    offsets: Pieces
    strides: Pieces
    lengths: Pieces

    def rows(self, block_ids: Pieces) -> Pieces:
        """(byte offset, length) of every piece of these blocks, int64 [n, pieces, 2]."""
        table = np.empty((len(block_ids), len(self.offsets), 2), np.int64)
        table[:, :, 0] = self.offsets + block_ids[:, None] * self.strides
        table[:, :, 1] = self.lengths
        return table

    def moved(self, by: int) -> BlockPieces:
        """The same, ``by`` bytes further."""
        return BlockPieces(self.offsets + by, self.strides, self.lengths)

    @classmethod
    def joined(cls, parts: Sequence[BlockPieces]) -> BlockPieces:
        """All of them, one after the other, in as few pieces: neighbours that touch in every block are one."""
        offsets = np.concatenate([part.offsets for part in parts])
        strides = np.concatenate([part.strides for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        apart = (offsets[1:] != offsets[:-1] + lengths[:-1]) | (strides[1:] != strides[:-1])
        starts = np.flatnonzero(np.concatenate(([True], apart)))
        return cls(offsets[starts], strides[starts], np.add.reduceat(lengths, starts))


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All of an engine's groups over one set of tensors. The same for every rank but the bytes' content.

    ``hash_block_tokens`` divides every group's ``block_tokens``; the hash of a group's block is the request's
    hash at its last hash block. ``aligned_tokens``: hits are multiples of it.

    ``shard_count``: pool blocks that one block of the engine is, over all ranks. A rank holds ``shards_per_rank`` of
    them that follow each other, cut by heads where that is more than one; each is held alike by ``replicas`` ranks
    that follow each other.
    """

    groups: tuple[GroupLayout, ...]
    num_blocks: int
    num_tensors: int
    page_bytes: int  #: one block of one layer, on one rank
    parts: Literal[1, 2]  #: 2: K and V apart; 1: one latent
    hash_block_tokens: int
    hash_bytes: int
    aligned_tokens: int
    shard_count: int = 1
    shards_per_rank: int = 1
    replicas: int = 1

    @property
    def distinct_ranks(self) -> int:
        """Ranks whose KV differs: those that hold the same shards count once."""
        return self.shard_count // self.shards_per_rank

    @property
    def ranks(self) -> int:
        """How many report each job."""
        return self.distinct_ranks * self.replicas

    def shards(self, rank: int) -> range:
        """Shards that a rank, of ``distinct_ranks``, holds."""
        return range(rank * self.shards_per_rank, (rank + 1) * self.shards_per_rank)

    @property
    def memory_bytes(self) -> int:
        """Of one rank."""
        return self.num_tensors * self.num_blocks * self.page_bytes

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of the group on one rank, all of its shards."""
        return self.groups[group].block_bytes or self.groups[group].layers * self.page_bytes

    def shard_bytes(self, group: int) -> int:
        """Bytes of one pool block of the group."""
        return self.block_bytes(group) // self.shards_per_rank

    def layer_ends(self, group: int) -> tuple[int, ...]:
        """Where each layer's pages end in a pool block of the group, in bytes."""
        if self.groups[group].block_bytes:
            return (self.shard_bytes(group),) * self.groups[group].layers
        page = self.page_bytes // self.shards_per_rank
        return tuple((layer + 1) * page for layer in range(self.groups[group].layers))

    def shard_pieces(self, group: int, index: int) -> BlockPieces:
        """Where the ``index``-th shard of a rank lies: a piece is the heads of one token, in K or in V of a layer."""
        tokens, part = self.groups[group].block_tokens, self.page_bytes // self.parts
        token = part // tokens
        heads = token // self.shards_per_rank
        pages = np.arange(self.groups[group].layers * self.parts, dtype=np.int64) * (self.num_blocks * part)
        places = np.arange(tokens, dtype=np.int64) * token + index * heads
        offsets = (pages[:, None] + places[None, :]).reshape(-1)
        return BlockPieces(offsets, np.full_like(offsets, part), np.full_like(offsets, heads))

    def descriptors(self, group: int) -> Pieces:
        """(byte offset, length) of every piece of every block id on a rank, int64 [num_blocks, layers * parts, 2]."""
        part = self.page_bytes // self.parts
        pieces = np.arange(self.groups[group].layers * self.parts, dtype=np.int64) * (self.num_blocks * part)
        table = np.empty((self.num_blocks, len(pieces), 2), np.int64)
        table[:, :, 0] = pieces[None, :] + np.arange(self.num_blocks, dtype=np.int64)[:, None] * part
        table[:, :, 1] = part
        return table


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """KV memory that the engine allocated itself, instead of the one buffer above.

    ``bytes``: flat u8 view that spans all of it; only what the tables name is ever touched. On a device it is empty,
    and ``device`` has the allocations, of one device; offsets count from the first. ``tables``: one a group, (byte
    offset, length) of every piece of every block id, int64 [num_blocks, pieces, 2]; empty for a group not pooled.
    ``owner`` keeps the memory alive. ``layer_ends``: for each group where each layer's pages end in a
    block; () where that is not known. ``shards``: for each group the rank's shards of a block, where there are several.
    ``staged``: on a device whose memory may be exchanged under its addresses, so that nobody else may be given them.
    """

    bytes: npt.NDArray[np.uint8]
    tables: tuple[Pieces, ...]
    owner: object = None
    layer_ends: tuple[tuple[int, ...], ...] = ()
    device: tuple[Buffer, ...] = ()
    shards: tuple[tuple[BlockPieces, ...], ...] = ()
    staged: bool = False

    @property
    def registered(self) -> npt.NDArray[np.uint8] | tuple[Buffer, ...]:
        """What a client registers."""
        return self.device or self.bytes

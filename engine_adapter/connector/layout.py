"""How one engine's KV memory maps to blocks of the pool: geometry, namespaces, and nothing that moves.

::

    memory of a rank, one buffer:   tensor 0 | tensor 1 | ... | tensor t-1
    a tensor, MHA/GQA:              K of all block ids | V of all block ids
    a tensor, MLA:                  latent of all block ids

    pool block of group g, id b:    for each layer slot i of g:  K page of b in tensor i, V page of b in tensor i
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvstrata.transfer.gpu.memory import Buffer


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group. ``window_tokens`` 0: a hit needs every block of the prefix; otherwise only those that
    hold the last ``window_tokens - 1`` tokens before the first one to compute. ``poolable`` False: never stored
    (a state or an encoder's KV that a prefix does not determine). ``block_bytes`` of one pool block on one rank; 0:
    ``layers`` pages, as above."""

    fingerprint: str  #: the namespace group of :meth:`kvstrata.client.Client.namespace`
    block_tokens: int
    layers: int  #: layer slots: tensors 0 to layers - 1
    window_tokens: int = 0
    poolable: bool = True
    block_bytes: int = 0


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All of an engine's groups over one set of tensors. The same for every rank but the bytes' content.

    ``hash_block_tokens`` divides every group's ``block_tokens``; the hash of a group's block is the request's
    hash at its last hash block. ``aligned_tokens``: hits are multiples of it. ``shard_count`` shards,
    each held alike by ``replicas`` ranks that follow each other.
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
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """How many report each job."""
        return self.shard_count * self.replicas

    @property
    def memory_bytes(self) -> int:
        """Of one rank."""
        return self.num_tensors * self.num_blocks * self.page_bytes

    def block_bytes(self, group: int) -> int:
        """Bytes of one pool block of the group, on one rank."""
        return self.groups[group].block_bytes or self.groups[group].layers * self.page_bytes

    def layer_ends(self, group: int) -> tuple[int, ...]:
        """Where each layer's pages end in a pool block of the group, in bytes."""
        if self.groups[group].block_bytes:
            return (self.groups[group].block_bytes,) * self.groups[group].layers
        return tuple((layer + 1) * self.page_bytes for layer in range(self.groups[group].layers))

    def descriptors(self, group: int) -> npt.NDArray[np.int64]:
        """(byte offset, length) of every piece of every block id, int64 [num_blocks, layers * parts, 2]."""
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
    block; () where that is not known.
    """

    bytes: npt.NDArray[np.uint8]
    tables: tuple[npt.NDArray[np.int64], ...]
    owner: object = None
    layer_ends: tuple[tuple[int, ...], ...] = ()
    device: tuple[Buffer, ...] = ()

    @property
    def registered(self) -> npt.NDArray[np.uint8] | tuple[Buffer, ...]:
        """What a client registers."""
        return self.device or self.bytes

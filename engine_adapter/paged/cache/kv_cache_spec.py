"""What one layer needs of the KV cache, and how layers share one pool of block ids.

A *page* is one block of one layer. Layers with equal specs form a *group*; a request has one block table a
group. Block ids are unique over all groups, so the i-th layers of all groups share one tensor: a block id
belongs to one group at a time, and its page in tensor i is that group's i-th layer's.
"""

from __future__ import annotations

from math import lcm

import msgspec
import numpy as np

from kvstrata.proto.errors import InvalidArgument


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Common to all kinds. ``block_size`` in tokens; ``dtype`` a numpy dtype name ("float32")."""

    block_size: int
    dtype: str = "float32"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError

    def max_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Most blocks that one request can hold at a time: what admission must be able to promise it."""
        return _blocks(max_model_len, self.block_size)

    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Bytes of one layer for one request of ``max_model_len`` tokens, at its worst moment."""
        return self.max_blocks(max_model_len, max_num_batched_tokens) * self.page_size_bytes

    @property
    def itemsize(self) -> int:
        return int(np.dtype(self.dtype).itemsize)


class FullAttentionSpec(AttentionSpec, frozen=True, kw_only=True, tag="full"):
    """Every token attends to all before it. Page: K and V, each [block_size, num_kv_heads, head_size]."""

    num_kv_heads: int
    head_size: int

    @property
    def page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.itemsize


class SlidingWindowSpec(FullAttentionSpec, frozen=True, kw_only=True, tag="sliding_window"):
    """A token attends to itself and the ``sliding_window - 1`` tokens before it."""

    sliding_window: int

    def max_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        # The window before the first token of a step and the step's tokens, cut anywhere inside blocks. Or, while
        # a load is under way, the window before it (for when it fails) and the one it brings.
        window = self.sliding_window - 1
        tokens = min(window + max(max_num_batched_tokens, window), max_model_len)
        return min(_blocks(tokens, self.block_size) + 1, _blocks(max_model_len, self.block_size))


class MLASpec(AttentionSpec, frozen=True, kw_only=True, tag="mla"):
    """Full attention over one latent vector a token (no heads, K and V together): [block_size, latent_size]."""

    latent_size: int

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.latent_size * self.itemsize


class ChunkedLocalSpec(FullAttentionSpec, frozen=True, kw_only=True, tag="chunked_local"):
    """A token attends within its own chunk of ``chunk_size`` tokens only."""

    chunk_size: int

    def max_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        # As for a sliding window: the chunk and the step's tokens, or the chunks before and after a load.
        tokens = min(self.chunk_size + max(max_num_batched_tokens, self.chunk_size), max_model_len)
        return min(_blocks(tokens, self.block_size) + 1, _blocks(max_model_len, self.block_size))


class CrossAttentionSpec(FullAttentionSpec, frozen=True, kw_only=True, tag="cross"):
    """Decoder attends to ``max_encoder_len`` encoder tokens, held as long as the request; never shared by prefix."""

    max_encoder_len: int

    def max_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        return _blocks(self.max_encoder_len, self.block_size)


class MambaSpec(AttentionSpec, frozen=True, kw_only=True, tag="mamba"):
    """A state of constant size a request: one block, whatever its length. ``shapes`` of the state's tensors."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def page_size_bytes(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes) * self.itemsize

    def max_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        return 1


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec | MLASpec | ChunkedLocalSpec | CrossAttentionSpec | MambaSpec


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers with equal specs. ``layers``: indices into the model's layers, ascending."""

    layers: tuple[int, ...]
    spec: KVCacheSpec


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cache: ``num_blocks`` ids (id 0 is the null block), one tensor a slot of the largest group."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    max_model_len: int
    max_num_batched_tokens: int

    @property
    def num_tensors(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @property
    def page_size_bytes(self) -> int:
        """The one page size of all groups."""
        return self.groups[0].spec.page_size_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes that one block id stands for, over all tensors."""
        return self.num_tensors * self.page_size_bytes

    @property
    def aligned_tokens(self) -> int:
        """Hit lengths are multiples of this: the LCM of the groups' block sizes."""
        return lcm(*(group.spec.block_size for group in self.groups))

    def validated(self) -> KVCacheConfig:
        """Return self; raises :class:`InvalidArgument` when groups cannot share pages or one request cannot fit."""
        sizes = {group.spec.page_size_bytes for group in self.groups}
        if len(sizes) != 1:
            raise InvalidArgument(f"groups have pages of {sorted(sizes)} bytes: give them block sizes that equal out")
        if self.num_blocks < 2:
            raise InvalidArgument(f"num_blocks is {self.num_blocks}: at least 2 (block 0 is the null block)")
        return self

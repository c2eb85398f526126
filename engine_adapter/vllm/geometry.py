"""Where the bytes of each block lie in the KV tensors that vLLM allocated. Addresses and strides only.

A pool block is its layers' pages one after the other. A page is its elements in the order of their addresses, block by
block, wherever the tensor has its dimension of blocks: so K and V apart, or side by side in each block, give the same
bytes, and so do layers in tensors of their own or in one that has all layers of a block together. Pages whose tokens
come before their heads (NHD) and others (HND) differ.

A block that is cut by heads is several pool blocks: of each page the elements of a shard's heads, in the same order. So
they are what the pages of engines with more ranks have, which have those heads alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.connector.layout import BlockPieces, EngineMemory, check_pieces
from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.gpu.memory import Buffer, device_memory
from kvstrata.transfer.memory import HOST

Pieces = npt.NDArray[np.int64]

#: Where vLLM has the heads in the shape of a layer's KV tensor, whatever the order in memory.
HEADS: Final = 1


class Storage(Protocol):
    """What is read of a torch storage."""

    def data_ptr(self) -> int: ...
    def nbytes(self) -> int: ...


class Tensor(Protocol):
    """What is read of a torch tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def untyped_storage(self) -> Storage: ...


class _Held(NamedTuple):
    """A storage, and the device memory that it is; None on the host."""

    storage: Storage
    device: Buffer | None


def block_pieces(tensor: Tensor, num_blocks: int) -> Pieces:
    """(address, length) of the contiguous pieces of each block, int64 [num_blocks, pieces, 2].

    The blocks are the first dimension (or the second, where K and V are apart); a kernel may cut each into several.
    Raises :class:`InvalidArgument` for another shape.
    """
    return _found(tensor, num_blocks, list(tensor.shape)).rows(np.arange(num_blocks, dtype=np.int64))


def head_pieces(tensor: Tensor, num_blocks: int, heads: int, shards: int) -> tuple[BlockPieces, ...]:
    """Addresses of each block's pieces, once for each of ``shards`` equal parts of its ``heads``.

    Raises :class:`InvalidArgument` when the shape is not [blocks, heads, tokens, content].
    """
    sizes = list(tensor.shape)
    if len(sizes) != 4 or sizes[0] % num_blocks or sizes[HEADS] != heads or heads % shards:
        raise InvalidArgument(
            f"a KV tensor of shape {tuple(sizes)} is not [blocks, {heads} heads, tokens, content], which can be cut: "
            "leave kv_shards out"
        )
    each = heads // shards
    sizes[HEADS] = each
    first = _found(tensor, num_blocks, sizes)
    step = each * tensor.stride()[HEADS] * tensor.element_size()
    return tuple(first.moved(shard * step) for shard in range(shards))


def _found(tensor: Tensor, num_blocks: int, sizes: Sequence[int]) -> BlockPieces:
    """Addresses of the pieces of the first ``sizes`` elements of the tensor's dimensions."""
    strides, item = list(tensor.stride()), tensor.element_size()
    axis = next((i for i in (0, 1) if i < len(sizes) and sizes[i] and sizes[i] % num_blocks == 0), None)
    if axis is None:
        raise InvalidArgument(f"a KV tensor of shape {tuple(tensor.shape)} does not hold {num_blocks} blocks")
    rows = sizes[axis] // num_blocks
    inner = [(rows, strides[axis]), *((sizes[i], strides[i]) for i in range(len(sizes)) if i != axis)]
    inner = sorted(((size, stride) for size, stride in inner if size > 1), key=lambda pair: pair[1])
    run = 1
    while inner and inner[0][1] == run:
        run *= inner.pop(0)[0]
    offsets = np.zeros(1, np.int64)
    for size, stride in inner:
        offsets = (np.arange(size, dtype=np.int64)[:, None] * stride + offsets[None, :]).reshape(-1)
    block = rows * strides[axis] * item
    return BlockPieces(
        tensor.data_ptr() + offsets * item, np.full(len(offsets), block, np.int64), np.full(len(offsets), run * item)
    )


def group_pieces(tensors: Sequence[Tensor], num_blocks: int) -> Pieces:
    """The pieces of all layers of a group, in their order; layers that share a tensor count once."""
    return joined(np.concatenate([block_pieces(tensor, num_blocks) for tensor in _distinct(tensors)], axis=1))


def group_shards(
    tensors: Sequence[Tensor], num_blocks: int, heads: Sequence[int], shards: int
) -> tuple[BlockPieces, ...]:
    """:func:`head_pieces` of all layers of a group, in their order; ``heads``: of each tensor."""
    counts = {tensor.data_ptr(): count for tensor, count in zip(tensors, heads, strict=True)}
    layers = [head_pieces(tensor, num_blocks, counts[tensor.data_ptr()], shards) for tensor in _distinct(tensors)]
    return tuple(BlockPieces.joined(of_shard) for of_shard in zip(*layers, strict=True))


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        found.setdefault(tensor.data_ptr(), tensor)
    return list(found.values())


def joined(table: Pieces) -> Pieces:
    """The same bytes in fewer pieces: neighbours that touch in every block are one."""
    if not table.size:
        return table
    apart = (table[:, 1:, 0] != table[:, :-1, 0] + table[:, :-1, 1]).any(axis=0)
    starts = np.flatnonzero(np.concatenate(([True], apart)))
    fewer = np.empty((len(table), len(starts), 2), np.int64)
    fewer[:, :, 0] = table[:, starts, 0]
    fewer[:, :, 1] = np.add.reduceat(table[:, :, 1], starts, axis=1)
    return fewer


def engine_memory(
    groups: Sequence[Sequence[str]],
    poolable: Sequence[bool],
    kv_caches: Mapping[str, Tensor],
    num_blocks: int,
    shards: int = 1,
    heads: Mapping[str, int] | None = None,
) -> EngineMemory:
    """vLLM's KV tensors as memory of the connector. ``groups``: names of the layers of each KV cache group.
    ``shards`` that each block is cut into, and by layer the ``heads`` that are cut.

    One view spans all tensors, also where they are allocations of their own and something else lies between them:
    only what the tables name is touched. Raises :class:`InvalidArgument` for a layer without a tensor, for tensors
    that are not all on the host or on one device, and for blocks in too many pieces.
    """
    missing = [name for names, kept in zip(groups, poolable, strict=True) if kept for name in names]
    missing = [name for name in missing if name not in kv_caches]
    if missing:
        raise InvalidArgument(f"vLLM registered no KV tensor for {', '.join(missing[:4])}")
    tensors = [kv_caches[name] for names, kept in zip(groups, poolable, strict=True) if kept for name in names]
    held = [_Held(storage, device_memory(storage)) for storage in (tensor.untyped_storage() for tensor in tensors)]
    memories = {HOST if one.device is None else one.device.memory for one in held}
    if len(memories) != 1:
        places = sorted(memory.spelled() or "the host" for memory in memories)
        raise InvalidArgument(f"KV memory on {', '.join(places)}: expected all of it in one place")
    first = min(one.storage.data_ptr() for one in held)
    tables: list[Pieces] = []
    parts: list[tuple[BlockPieces, ...]] = []
    for names, kept in zip(groups, poolable, strict=True):
        if not kept or not names:
            tables.append(np.empty((num_blocks, 0, 2), np.int64))
            parts.append(())
            continue
        layers = [kv_caches[name] for name in names]
        if shards > 1:
            found = group_shards(layers, num_blocks, [(heads or {}).get(name, 0) for name in names], shards)
            check_pieces(len(found[0].offsets), shards)
            parts.append(tuple(part.moved(-first) for part in found))
        table = group_pieces(layers, num_blocks)
        if shards == 1:
            check_pieces(table.shape[1], shards)
        table[:, :, 0] -= first
        tables.append(table)
    device = {one.device.address: one.device for one in held if one.device is not None}
    span = np.zeros(0, np.uint8) if device else _span(first, held)
    cut = tuple(parts) if shards > 1 else ()
    return EngineMemory(span, tuple(tables), owner=tensors, device=tuple(device.values()), shards=cut)


def _span(first: int, held: Sequence[_Held]) -> npt.NDArray[np.uint8]:
    """The host's memory from ``first`` to the end of the last storage."""
    last = max(one.storage.data_ptr() + one.storage.nbytes() for one in held)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first))

"""The bytes that the tables name are the blocks' own, in every layout of dimensions."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from kvstrata.engine_adapter.vllm.geometry import block_pieces, engine_memory
from kvstrata.proto.errors import InvalidArgument
from tests.engine_adapter.vllm.stand_ins import ArrayTensor

BLOCKS, HEADS, TOKENS, CHANNELS = 6, 3, 4, 8


def tensor_in(order: tuple[int, ...], shape: tuple[int, ...] = (BLOCKS, HEADS, TOKENS, CHANNELS)) -> ArrayTensor:
    """Dimensions of logical ``shape``, laid out in memory in ``order``; every element is another number."""
    flat = np.arange(np.prod(shape), dtype=np.float32)
    physical = flat.reshape([shape[axis] for axis in order])
    return ArrayTensor(physical.transpose(np.argsort(order)), flat.view(np.uint8))


def gather(memory: npt.NDArray[np.uint8], table: npt.NDArray[np.int64], block: int) -> bytes:
    return b"".join(memory[offset : offset + length].tobytes() for offset, length in table[block].tolist())


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_block_is_all_of_its_elements_once(order: tuple[int, ...]) -> None:
    tensor = tensor_in(order)
    table = block_pieces(tensor, BLOCKS)
    memory = tensor.untyped_storage()._base
    table[:, :, 0] -= memory.ctypes.data
    for block in range(BLOCKS):
        named = np.frombuffer(gather(memory, table, block), np.float32)
        assert sorted(named) == sorted(tensor.array[block].reshape(-1))


def test_blocks_that_are_contiguous_are_one_piece() -> None:
    assert block_pieces(tensor_in((0, 1, 2, 3)), BLOCKS).shape == (BLOCKS, 1, 2)
    assert block_pieces(tensor_in((0, 3, 1, 2)), BLOCKS).shape == (BLOCKS, 1, 2)
    assert block_pieces(tensor_in((1, 0, 2, 3)), BLOCKS).shape == (BLOCKS, HEADS, 2)


def test_a_kernel_may_cut_blocks_smaller() -> None:
    halves = tensor_in((0, 1, 2, 3), (2 * BLOCKS, HEADS, TOKENS, CHANNELS))
    table = block_pieces(halves, BLOCKS)
    assert table.shape == (BLOCKS, 1, 2) and table[0, 0, 1] == 2 * HEADS * TOKENS * CHANNELS * 4
    memory = halves.untyped_storage()._base
    table[:, :, 0] -= memory.ctypes.data
    assert gather(memory, table, 1) == halves.array[2:4].tobytes()


def test_k_and_v_may_lie_apart() -> None:
    apart = tensor_in((0, 1, 2, 3), (2, BLOCKS + 1, TOKENS, CHANNELS))
    table = block_pieces(apart, BLOCKS + 1)
    memory = apart.untyped_storage()._base
    table[:, :, 0] -= memory.ctypes.data
    assert gather(memory, table, 2) == apart.array[0, 2].tobytes() + apart.array[1, 2].tobytes()


def test_another_shape_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="does not hold 7 blocks"):
        block_pieces(tensor_in((0, 1, 2, 3)), 7)


def test_one_view_spans_tensors_of_their_own_and_names_only_theirs() -> None:
    tensors = {name: tensor_in((0, 1, 2, 3)) for name in ("a", "b", "c")}
    memory = engine_memory([["b", "a"], ["c"]], [True, True], tensors, BLOCKS)
    for group, names in enumerate((("b", "a"), ("c",))):
        for block in range(BLOCKS):
            expected = b"".join(tensors[name].array[block].tobytes() for name in names)
            assert gather(memory.bytes, memory.tables[group], block) == expected
    offset = int(memory.tables[0][3, 1, 0])
    memory.bytes[offset : offset + 4] = np.frombuffer(np.float32(-1).tobytes(), np.uint8)
    assert tensors["a"].array[3].reshape(-1)[0] == -1


def test_layers_that_share_a_tensor_count_once() -> None:
    tensor = tensor_in((0, 1, 2, 3))
    memory = engine_memory([["a", "shares_a"]], [True], {"a": tensor, "shares_a": tensor}, BLOCKS)
    assert memory.tables[0].shape == (BLOCKS, 1, 2)


def test_a_group_that_is_not_pooled_has_no_pieces_and_needs_no_tensors() -> None:
    memory = engine_memory([["a"], ["state"]], [True, False], {"a": tensor_in((0, 1, 2, 3))}, BLOCKS)
    assert memory.tables[1].shape == (BLOCKS, 0, 2)


def test_a_layer_without_a_tensor_is_named() -> None:
    with pytest.raises(InvalidArgument, match="no KV tensor for b"):
        engine_memory([["a", "b"]], [True], {"a": tensor_in((0, 1, 2, 3))}, BLOCKS)


def test_tensors_of_torch_on_a_cpu_are_memory_of_the_host() -> None:
    torch = pytest.importorskip("torch")
    tensors = {name: torch.zeros(2, BLOCKS, TOKENS, CHANNELS) for name in ("a", "b")}
    memory = engine_memory([["a", "b"]], [True], tensors, BLOCKS)
    assert not memory.device and memory.registered is memory.bytes
    offset, length = memory.tables[0][3, 2].tolist()  # K of block 3 in b
    memory.bytes[offset : offset + length] = np.full(length // 4, 2, np.float32).view(np.uint8)
    assert float(tensors["b"][0, 3].min()) == 2 and float(tensors["b"][0, 2].max()) == 0

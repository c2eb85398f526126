"""KV tensors on a device: whatever way they are laid out, the pool's bytes are the same where they are to be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector.layout import EngineMemory
from kvstrata.engine_adapter.vllm.geometry import engine_memory, joined
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.memory import Memory
from kvstrata.transfer.regions import BlockView, Region
from tests.engine_adapter.vllm.device_tensors import DeviceTensor, allocate, views
from tests.engine_adapter.vllm.stand_ins import ArrayTensor
from tests.transfer.gpu.fake_device import FakeDevice, fake_device
from tests.transfer.gpu.staged_peer import CUDA, World, names, space, staged

LAYERS, BLOCKS, TOKENS, HEADS, CHANNELS = 3, 5, 4, 2, 8
SIZES = {"K": 2, "B": BLOCKS, "N": TOKENS, "H": HEADS, "C": CHANNELS}
BLOCK_BYTES = LAYERS * 2 * TOKENS * HEADS * CHANNELS * 2


@dataclass(frozen=True)
class Layout:
    """``page``: how K/V, tokens, heads and channels follow each other, outermost first. ``at``: where the dimension of
    blocks is put among them. ``first``: "K" for shape (2, blocks, ...), "B" for (blocks, 2, ...). ``layers``: each in
    an allocation of its own ("apart"), in one ("stacked"), or all of a block together ("crossed")."""

    page: str
    at: int
    first: str
    layers: str

    @property
    def logical(self) -> str:
        return ("KB" if self.first == "K" else "BK") + "NHC"

    def tensors(self, device: FakeDevice) -> list[DeviceTensor]:
        physical = self.page[: self.at] + "B" + self.page[self.at :]
        shape = [SIZES[axis] for axis in self.logical]
        if self.layers == "apart":
            order = [self.logical.index(axis) for axis in physical]
            return [allocate(device, shape, order) for _ in range(LAYERS)]
        logical = "L" + self.logical
        place = 0 if self.layers == "stacked" else physical.index("B") + 1
        order = [logical.index(axis) for axis in physical[:place] + "L" + physical[place:]]
        return views(allocate(device, [LAYERS, *shape], order), 0)

    def fill(self, tensors: list[DeviceTensor], content: npt.NDArray[np.float16]) -> None:
        """``content`` [layers, K/V, blocks, tokens, heads, channels]."""
        for tensor, layer in zip(tensors, content, strict=True):
            tensor.shadow[...] = layer if self.first == "K" else layer.swapaxes(0, 1)

    def read(self, tensors: list[DeviceTensor]) -> npt.NDArray[np.float16]:
        return np.stack([tensor.shadow if self.first == "K" else tensor.shadow.swapaxes(0, 1) for tensor in tensors])


def layouts(page: str) -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        page=st.just(page),
        at=st.integers(0, 3),
        first=st.sampled_from("KB"),
        layers=st.sampled_from(["apart", "stacked", "crossed"]),
    )


pages = st.permutations("KNH").map(lambda axes: "".join(axes) + "C")


def content_of(seed: int) -> npt.NDArray[np.float16]:
    bits = np.random.default_rng(seed).integers(0, 1 << 16, (LAYERS, 2, BLOCKS, TOKENS, HEADS, CHANNELS), np.uint16)
    return bits.view(np.float16)


def blocks_of(world: World, tensors: list[DeviceTensor]) -> BlockView:
    layers = {f"layer{i}": tensor for i, tensor in enumerate(tensors)}
    memory = engine_memory([list(layers)], [True], layers, BLOCKS)
    return region_of(memory).view(space(BLOCK_BYTES), memory.tables[0])


def region_of(memory: EngineMemory) -> Region:
    return Region.spanning(CUDA, [(each.address, each.nbytes) for each in memory.device], memory)


@settings(max_examples=60, deadline=None)
@given(st.data(), pages)
def test_layouts_with_the_same_pages_give_the_same_bytes_and_read_each_others(data: st.DataObject, page: str) -> None:
    one, other = data.draw(layouts(page), "one"), data.draw(layouts(page), "other")
    content, keys = content_of(1), names(BLOCKS)
    with staged(chunk_bytes=2 * BLOCK_BYTES, nbytes=1 << 20) as world:
        tensors = one.tensors(world.device)
        one.fill(tensors, content)
        pushed = world.push(space(BLOCK_BYTES), b"".join(keys), blocks_of(world, tensors))
        assert set(pushed.status.tolist()) == {BlockStatus.STORED}
        axes = ["KNHC".index(axis) for axis in page]
        for block, key in enumerate(keys):
            expected = b"".join(layer[:, block].transpose(axes).tobytes() for layer in content)
            assert world.node.blocks[key] == expected
        into = other.tensors(world.device)
        fetched = world.fetch(space(BLOCK_BYTES), b"".join(keys), blocks_of(world, into))
        assert set(fetched.status.tolist()) == {BlockStatus.LOADED}
        assert (other.read(into).view(np.uint16) == content.view(np.uint16)).all()


def test_tokens_before_heads_and_heads_before_tokens_differ() -> None:
    content, found = content_of(2), []
    with staged(chunk_bytes=2 * BLOCK_BYTES, nbytes=1 << 20) as world:
        for page in ("KNHC", "KHNC"):
            layout = Layout(page, 1, "K", "apart")
            tensors = layout.tensors(world.device)
            layout.fill(tensors, content)
            world.push(space(BLOCK_BYTES), names(1)[0], blocks_of(world, tensors)[:1])
            found.append(world.node.blocks[names(1)[0]])
    assert found[0] != found[1] and sorted(found[0]) == sorted(found[1])


@pytest.mark.parametrize("order", ["BHNC", "BNHC", "HBNC"])
def test_shards_of_one_rank_are_what_ranks_with_their_heads_alone_would_store(order: str) -> None:
    """[blocks, heads, tokens, channels], as vLLM gives it, in several orders of memory."""
    shape, size = (BLOCKS, HEADS, TOKENS, CHANNELS), BLOCKS * HEADS * TOKENS * CHANNELS
    content = np.random.default_rng(3).integers(0, 1 << 16, (LAYERS, *shape), np.uint16).view(np.float16)
    space_of = space(LAYERS * size * 2 // BLOCKS // HEADS)
    with staged(chunk_bytes=1 << 14, nbytes=1 << 20) as world:
        tensors = [allocate(world.device, list(shape), ["BHNC".index(axis) for axis in order]) for _ in range(LAYERS)]
        for tensor, layer in zip(tensors, content, strict=True):
            tensor.shadow[...] = layer
        layers = {f"layer{i}": tensor for i, tensor in enumerate(tensors)}
        memory = engine_memory([list(layers)], [True], layers, BLOCKS, HEADS, dict.fromkeys(layers, HEADS))
        keys, ids = names(BLOCKS), np.arange(BLOCKS)
        for head, pieces in enumerate(memory.shards[0]):
            view = region_of(memory).view(space_of, pieces.rows(ids))
            assert set(world.push(space_of, b"".join(keys), view).status.tolist()) == {BlockStatus.STORED}
            for block, key in enumerate(keys):
                assert world.node.blocks[key] == content[:, block, head].tobytes()
            world.node.blocks.clear()


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device(1 << 20) as device:
        yield device


@pytest.mark.parametrize(
    ("layout", "pieces", "allocations"),
    [
        (Layout("KNHC", 1, "K", "apart"), 2 * LAYERS, LAYERS),
        (Layout("KNHC", 0, "B", "apart"), LAYERS, LAYERS),
        (Layout("KNHC", 1, "K", "stacked"), 2 * LAYERS, 1),
        (Layout("KNHC", 0, "B", "crossed"), 1, 1),
        (Layout("KHNC", 2, "K", "apart"), 2 * HEADS * LAYERS, LAYERS),
    ],
    ids=str,
)
def test_pieces_are_as_few_as_the_layout_allows(
    device: FakeDevice, layout: Layout, pieces: int, allocations: int
) -> None:
    layers = {f"layer{i}": tensor for i, tensor in enumerate(layout.tensors(device))}
    memory = engine_memory([list(layers)], [True], layers, BLOCKS)
    assert memory.tables[0].shape == (BLOCKS, pieces, 2)
    assert len(memory.device) == allocations and not memory.bytes.size
    assert {each.memory for each in memory.device} == {CUDA}
    assert memory.registered == memory.device


def test_kv_memory_in_two_places_is_refused(device: FakeDevice) -> None:
    here = Layout("KNHC", 1, "K", "apart").tensors(device)
    flat = np.zeros(2 * BLOCKS * TOKENS * HEADS * CHANNELS, np.float32)
    host = ArrayTensor(flat.reshape(2, BLOCKS, TOKENS, HEADS, CHANNELS), flat.view(np.uint8))
    with pytest.raises(InvalidArgument, match="cuda:0, the host"):
        engine_memory([["a", "b"]], [True], {"a": here[0], "b": host}, BLOCKS)
    with fake_device(1 << 20, Memory("cuda", 1)) as second:
        there = Layout("KNHC", 1, "K", "apart").tensors(second)
        with pytest.raises(InvalidArgument, match="cuda:0, cuda:1"):
            engine_memory([["a", "b"]], [True], {"a": here[0], "b": there[0]}, BLOCKS)


def test_only_neighbours_in_every_block_are_joined() -> None:
    table = np.array([[[0, 8], [8, 8], [16, 8]], [[32, 8], [40, 8], [56, 8]]])
    assert joined(table).tolist() == [[[0, 16], [16, 8]], [[32, 16], [56, 8]]]
    assert joined(table[:, :0]).shape == (2, 0, 2)

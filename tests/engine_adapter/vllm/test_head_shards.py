"""KV tensors cut by heads: engines of every tensor-parallel size have the same bytes in each shard, in every layout."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector import layout as connector_layout
from kvstrata.engine_adapter.vllm.geometry import engine_memory, head_pieces
from kvstrata.proto.errors import InvalidArgument
from tests.engine_adapter.vllm.stand_ins import ArrayTensor

BLOCKS, HEADS, TOKENS, CONTENT = 3, 4, 6, 5
#: vLLM's: how layers, blocks, heads, tokens and content follow each other in memory, outermost first.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
F32 = npt.NDArray[np.float32]


def tensors_of(content: F32, layout: str, kernel_rows: int = 1) -> dict[str, ArrayTensor]:
    """One a layer, of shape [blocks, heads, tokens, content], over one allocation that is laid out so. ``content``:
    [layers, blocks, heads, tokens, content] of one rank. ``kernel_rows``: what a kernel cuts each block into."""
    layers, blocks, heads, tokens, width = content.shape
    content = content.reshape(layers, blocks, heads, kernel_rows, tokens // kernel_rows, width)
    content = content.swapaxes(2, 3).reshape(layers, blocks * kernel_rows, heads, -1, width)
    order = ["LBHNC".index(axis) for axis in layout]
    base = np.ascontiguousarray(content.transpose(order))
    views = base.transpose(np.argsort(order))
    return {f"layer{i}": ArrayTensor(views[i], base.reshape(-1).view(np.uint8)) for i in range(layers)}


def content_of(seed: int, layers: int) -> F32:
    """Of all heads of a model."""
    return np.random.default_rng(seed).standard_normal((layers, BLOCKS, HEADS, TOKENS, CONTENT)).astype(np.float32)


def shards_of(content: F32, layout: str, ranks: int, kv_shards: int, kernel_rows: int) -> dict[tuple[int, int], bytes]:
    """Bytes of each (shard, block), as the ranks of an engine find them."""
    found: dict[tuple[int, int], bytes] = {}
    heads, each = HEADS // ranks, kv_shards // ranks
    for rank in range(ranks):
        tensors = tensors_of(content[:, :, rank * heads : (rank + 1) * heads], layout, kernel_rows)
        memory = engine_memory([list(tensors)], [True], tensors, BLOCKS, each, dict.fromkeys(tensors, heads))
        assert bool(memory.shards) == (each > 1)
        for index in range(each):
            rows = memory.tables[0] if each == 1 else memory.shards[0][index].rows(np.arange(BLOCKS))
            for block, pieces in enumerate(rows.tolist()):
                data = b"".join(memory.bytes[start : start + length].tobytes() for start, length in pieces)
                found[rank * each + index, block] = data
    return found


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    other=st.sampled_from(LAYOUTS),
    layers=st.integers(1, 3),
    kv_shards=st.sampled_from([1, 2, 4]),
    kernel_rows=st.sampled_from([1, 2]),
)
def test_shards_have_the_same_bytes_whatever_the_size(
    layout: str, other: str, layers: int, kv_shards: int, kernel_rows: int
) -> None:
    """Also of another order of layers and blocks, as long as heads and tokens follow each other alike."""
    content = content_of(1, layers)
    expected = shards_of(content, layout, kv_shards, kv_shards, kernel_rows)
    assert len(expected) == kv_shards * BLOCKS
    each = HEADS // kv_shards
    for (shard, block), data in expected.items():
        mine = content[:, block, shard * each : (shard + 1) * each]
        assert sorted(np.frombuffer(data, np.float32)) == sorted(mine.reshape(-1)), "each byte once"
    alike = (layout.index("H") < layout.index("N")) == (other.index("H") < other.index("N"))
    for ranks in (size for size in (1, 2, 4) if size <= kv_shards):
        assert shards_of(content, layout, ranks, kv_shards, kernel_rows) == expected
        if alike and kernel_rows == 1:
            assert shards_of(content, other, ranks, kv_shards, kernel_rows) == expected


@pytest.mark.parametrize(
    ("layout", "pieces"), [("LBHNC", 1), ("BLHNC", 1), ("LHBNC", 2), ("BHLNC", 2), ("LBNHC", TOKENS), ("BLNHC", TOKENS)]
)
def test_a_shard_is_a_piece_a_layer_where_heads_come_first_and_else_one_a_token(layout: str, pieces: int) -> None:
    tensor = tensors_of(content_of(2, 2), layout)["layer0"]
    for shard in head_pieces(tensor, BLOCKS, HEADS, 2):
        assert len(shard.offsets) == pieces and (shard.lengths == 2 * TOKENS * CONTENT * 4 // pieces).all()


def test_what_is_loaded_into_a_shard_is_its_heads_and_nothing_else() -> None:
    tensors = tensors_of(content_of(3, 2), "LBNHC")
    before = {name: tensor.array.copy() for name, tensor in tensors.items()}
    memory = engine_memory([list(tensors)], [True], tensors, BLOCKS, 4, dict.fromkeys(tensors, HEADS))
    for start, length in memory.shards[0][2].rows(np.array([1]))[0].tolist():
        ctypes.memset(memory.bytes.ctypes.data + start, 0, length)
    for name, tensor in tensors.items():
        assert not tensor.array[1, 2].any()
        tensor.array[1, 2] = before[name][1, 2]
        assert (tensor.array == before[name]).all()


def test_layers_that_share_a_tensor_are_cut_once_and_groups_that_are_not_pooled_not_at_all() -> None:
    (tensor,) = tensors_of(content_of(4, 1), "LBHNC").values()
    names = {"a": tensor, "shares_a": tensor, "state": tensor}
    heads = {"a": HEADS, "shares_a": HEADS, "state": 0}
    memory = engine_memory([["a", "shares_a"], ["state"]], [True, False], names, BLOCKS, 2, heads)
    assert [len(shards) for shards in memory.shards] == [2, 0]
    assert memory.shards[0][0].lengths.tolist() == [2 * TOKENS * CONTENT * 4]


@pytest.mark.parametrize(("shards", "pieces"), [(2, 2 * TOKENS), (1, 2)])
def test_blocks_in_more_pieces_than_a_call_may_name_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, shards: int, pieces: int
) -> None:
    """Every call would be. Tokens before heads: two layers, cut by token or whole."""
    tensors = tensors_of(content_of(5, 2), "LBNHC")
    monkeypatch.setattr(connector_layout, "PIECES_MAX", pieces)
    engine_memory([list(tensors)], [True], tensors, BLOCKS, shards, dict.fromkeys(tensors, HEADS))
    monkeypatch.setattr(connector_layout, "PIECES_MAX", pieces - 1)
    with pytest.raises(InvalidArgument, match=rf"in {pieces} pieces, and {pieces - 1} is the most.*smaller blocks"):
        engine_memory([list(tensors)], [True], tensors, BLOCKS, shards, dict.fromkeys(tensors, HEADS))


@pytest.mark.parametrize(
    ("shape", "heads", "shards"),
    [((BLOCKS, TOKENS, CONTENT), HEADS, 2), ((2, BLOCKS, HEADS, TOKENS, CONTENT), HEADS, 2), ((BLOCKS, 4, 6, 5), 6, 2)],
)
def test_a_tensor_whose_heads_cannot_be_found_is_refused(shape: tuple[int, ...], heads: int, shards: int) -> None:
    flat = np.zeros(int(np.prod(shape)), np.float32)
    with pytest.raises(InvalidArgument, match=rf"is not \[blocks, {heads} heads.*leave kv_shards out"):
        head_pieces(ArrayTensor(flat.reshape(shape), flat.view(np.uint8)), BLOCKS, heads, shards)

"""Where pages lie, and the names under which their bytes are shared."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import Namespace
from tests.engine_adapter.sglang.stand_ins import ArrayPool, Config


def named(pool: ArrayPool | None = None, name: str = "", **config: object) -> Namespace:
    return (pool or ArrayPool()).pages().namespace(Config(**config), name)  # type: ignore[arg-type]


@pytest.mark.parametrize(("layout", "pieces"), [("layer_first", 6), ("page_first", 2)])
def test_pieces_of_a_page(layout: str, pieces: int) -> None:
    pool = ArrayPool(layout)
    pages = pool.pages()
    assert (pages.pieces, pages.block_bytes, pages.page_tokens) == (pieces, 2 * 3 * 4 * 32, 4)
    table = pages.offsets(pool.slots_of(5, 0))
    assert table.shape == (2, pieces, 2) and (table[:, :, 1].sum(axis=1) == pages.block_bytes).all()
    assert table[1, 0, 0] == 0 and table[1, 1, 0] == pool.bytes.nbytes // 2
    assert table[0, 0, 0] == 5 * 4 * 32 * (1 if layout == "layer_first" else 3)


@pytest.mark.parametrize("slots", [0, 3, 5])
def test_slots_are_whole_pages(slots: int) -> None:
    with pytest.raises(InvalidArgument, match="whole pages"):
        ArrayPool().pages().offsets(np.arange(slots))


def test_a_pool_without_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArrayPool, "get_page_buffer_meta", lambda *_: None)
    with pytest.raises(InvalidArgument, match="0 pieces"):
        ArrayPool().pages()


def test_ranks_are_shards_and_alike_ranks_are_one() -> None:
    sharded = [named(tp_rank=rank, tp_size=2) for rank in range(2)]
    assert [(space.shard, space.shard_count) for space in sharded] == [(0, 2), (1, 2)]
    assert sharded[0].group == sharded[1].group
    alike = [named(is_mla_model=True, tp_rank=rank, tp_size=size) for rank, size in ((0, 1), (0, 2), (1, 2))]
    assert len({space.identity for space in alike}) == 1


def test_all_that_decides_the_bytes_is_in_the_name() -> None:
    upper = ArrayPool()
    upper.start_layer, upper.end_layer = 3, 6
    half = ArrayPool()
    half.dtype = "torch.float16"
    spaces = [
        named(),
        named(ArrayPool("page_first")),
        named(ArrayPool("page_first_direct")),  # pieces of the same sizes, in another order inside
        named(ArrayPool(page_size=8)),
        named(upper),
        named(half),
        named(model_name="org/other"),
        named(name="org/model@2"),
        named(tp_size=2),
        named(attn_cp_rank=0, attn_cp_size=2),
        named(attn_cp_rank=1, attn_cp_size=2),
    ]
    assert len({space.group for space in spaces}) == len(spaces)  # a pool knows a group with one layout only
    assert named().identity == named(ArrayPool().fill(1)).identity  # neither bytes nor addresses


def test_what_could_be_taken_for_something_else_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="names no model"):
        named(model_name=None)
    eight = ArrayPool()
    eight.dtype = "torch.uint8"
    with pytest.raises(InvalidArgument, match="8-bit format"):
        named(eight)
    assert "org/model fp8_e4m3" in named(eight, name="org/model fp8_e4m3").group

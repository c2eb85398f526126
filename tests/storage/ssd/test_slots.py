"""Headers and shapes: what goes in comes out, and no other byte pattern does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto.keys import GROUP_CHARACTERS_MAX, SALT_CHARACTERS_MAX, Namespace
from kvstrata.storage.ssd.base import SECTOR_BYTES, SlotHeader
from kvstrata.storage.ssd.slots import (
    HeaderTooLong,
    Place,
    Shape,
    decode_header,
    decode_shape,
    encode_header,
    encode_shape,
    slot_bytes_of,
)

DEVICE = bytes(range(16))
PLACE = Place(DEVICE, (7 << 32) + 1, 3, 12)
HEADER = SlotHeader(
    Namespace("model/v1", 10_000, 16, 32, 1, 2), 5, "salt-ü", b"h" * 32, 1 << 41, 2**64 - 1, b"p" * 32, 9, 1.5e9
)
u64 = st.integers(0, 2**64 - 1)


@given(
    group=st.text(st.characters(codec="utf-8"), min_size=1, max_size=200),
    salt=st.text(st.characters(codec="utf-8"), max_size=SALT_CHARACTERS_MAX),
    numbers=st.tuples(u64, u64, u64, u64),
    name=st.binary(min_size=16, max_size=32),
    parent=st.binary(max_size=32),
)
def test_a_header_says_what_it_was_told(
    group: str, salt: str, numbers: tuple[int, int, int, int], name: bytes, parent: bytes
) -> None:
    epoch, generation, checksum, index = numbers
    header = SlotHeader(Namespace(group, 1, 1, 16), epoch, salt, name, generation, checksum, parent, index, 0.5)
    sector = encode_header(header, PLACE)
    assert len(sector) == SECTOR_BYTES
    assert decode_header(sector) == (header, PLACE)


def test_no_byte_of_a_header_can_change() -> None:
    sector = bytearray(encode_header(HEADER, PLACE))
    for at in range(SECTOR_BYTES):
        for bit in (1, 128):
            sector[at] ^= bit
            assert decode_header(bytes(sector)) is None, f"byte {at} turned, and nobody saw it"
            sector[at] ^= bit
    assert decode_header(bytes(sector)) == (HEADER, PLACE)


def test_no_byte_of_a_shape_can_change() -> None:
    shape = Shape(slot_bytes_of(10_000), 3)
    sector = bytearray(encode_shape(shape, DEVICE, 4))
    assert decode_shape(bytes(sector), DEVICE, 4, 1 << 20) == shape
    for at in range(SECTOR_BYTES):
        sector[at] ^= 16
        assert decode_shape(bytes(sector), DEVICE, 4, 1 << 20) is None
        sector[at] ^= 16


def test_a_shape_of_another_place_or_size_is_not_believed() -> None:
    sector = encode_shape(Shape(slot_bytes_of(10_000), 3), DEVICE, 4)
    assert decode_shape(sector, DEVICE, 5, 1 << 20) is None
    assert decode_shape(sector, bytes(16), 4, 1 << 20) is None
    assert decode_shape(sector, DEVICE, 4, 8192) is None, "the slot is larger than the extent"
    for slot_bytes in (4096, 5000):
        assert decode_shape(encode_shape(Shape(slot_bytes, 1), DEVICE, 4), DEVICE, 4, 1 << 20) is None
    assert decode_shape(bytes(SECTOR_BYTES), DEVICE, 4, 1 << 20) == Shape(0, 0)


def test_the_longest_names_fit_unless_they_are_of_four_bytes_a_character() -> None:
    salt = "\U0001f600" * SALT_CHARACTERS_MAX
    for group in ("x" * GROUP_CHARACTERS_MAX, "漢" * GROUP_CHARACTERS_MAX):
        header = SlotHeader(Namespace(group, 1, 1, 32), 0, salt, b"h" * 32, 1, 1, b"p" * 32)
        assert decode_header(encode_header(header, PLACE)) == (header, PLACE)
    with pytest.raises(HeaderTooLong):
        encode_header(SlotHeader(Namespace("\U0001f600" * 1024, 1, 1), 0, salt, b"h" * 16, 1, 1), PLACE)

"""Payload encryption: AES in counter mode, in any pieces, and never one key stream for two payloads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto.keys import Namespace
from kvstrata.storage.ssd.base import SlotHeader
from kvstrata.storage.ssd.cipher import DATA_KEY_BYTES, DataKey, SlotCipher

HEADER = SlotHeader(Namespace("model", 5000, 16), 0, "tenant", b"h" * 16, generation=7, checksum=11)
KEY = DataKey(bytes(range(DATA_KEY_BYTES)))


def applied(cipher: SlotCipher, data: bytes, cuts: tuple[int, ...] = ()) -> bytes:
    """``data`` through the cipher, cut at multiples of 16, last piece first."""
    buffer = bytearray(data)
    edges = sorted({0, len(data), *(16 * cut for cut in cuts if 16 * cut < len(data))})
    for start, end in reversed(list(pairwise(edges))):
        cipher.apply(memoryview(buffer)[start:end], start)
    return bytes(buffer)


def test_aes_256_in_counter_mode_as_nist_publishes_it() -> None:
    """SP 800-38A, F.5.5."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    cipher = SlotCipher(key, int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16))
    plain = bytes.fromhex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51")
    wanted = bytes.fromhex("601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5")
    assert applied(cipher, plain) == wanted
    assert applied(cipher, plain, (1,)) == wanted


@given(st.binary(max_size=400), st.lists(st.integers(0, 30), max_size=4), st.integers(0, 2**128 - 1))
def test_pieces_in_any_order_are_the_whole_and_twice_is_nothing(data: bytes, cuts: list[int], start: int) -> None:
    cipher = SlotCipher(KEY.secret[:32], start)
    whole = applied(cipher, data)
    assert applied(cipher, data, tuple(cuts)) == whole
    assert applied(cipher, whole) == data


def test_the_counter_goes_round() -> None:
    """One library call carries past the end as pieces do."""
    cipher = SlotCipher(KEY.secret[:32], 2**128 - 2)
    whole = applied(cipher, bytes(64))
    assert applied(cipher, bytes(64), (1, 2, 3)) == whole
    zero = Cipher(algorithms.AES(KEY.secret[:32]), modes.ECB()).encryptor().update(bytes(16))
    assert whole[32:48] == zero


def test_every_write_has_a_key_stream_of_its_own() -> None:
    others = (
        HEADER,
        replace(HEADER, generation=8),
        replace(HEADER, checksum=12),  # a device put back to an earlier day: the generation again, another payload
        replace(HEADER, hash=b"i" * 16),
        replace(HEADER, generation=11, checksum=7),
    )
    streams = [applied(KEY.slot(header), bytes(64)) for header in others]
    streams.append(applied(DataKey.new().slot(HEADER), bytes(64)))
    blocks = {stream[at : at + 16] for stream in streams for at in range(0, 64, 16)}
    assert len(blocks) == 4 * len(streams)


def test_the_same_header_finds_the_same_stream() -> None:
    moved = replace(HEADER, parent=b"p" * 16, index=3, written_at=1.5)  # not known when a slot is read
    assert applied(KEY.slot(moved), bytes(64)) == applied(DataKey(KEY.secret).slot(HEADER), bytes(64))


def test_a_key_is_not_shown() -> None:
    shown = f"{KEY!r} {KEY} {KEY.slot(HEADER)!r}"
    assert KEY.secret[:4].hex() not in shown and "\\x01\\x02" not in shown


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="64 bytes, not 32"):
        DataKey(bytes(32))

"""The removal log: torn ends are normal, damage is seen, and what is missing is known or feared."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.proto.keys import Namespace
from kvstrata.storage.ssd.base import SECTOR_BYTES, Removal, SlotHeader
from kvstrata.storage.ssd.raw_file import DiskFile
from kvstrata.storage.ssd.removal_log import LogFull, encode_opening, encode_record, load, make, read_log
from kvstrata.storage.ssd.removals import RemovalIndex

NBYTES = 256 << 10
BEGIN = 1 << 40
LONG = b"x" * 9000


def text(*records: bytes, nbytes: int = 64 << 10) -> memoryview:
    return memoryview(bytearray(b"".join(records).ljust(nbytes, b"\0")))


def three() -> memoryview:
    return text(encode_opening(BEGIN), *(encode_record(BEGIN + 2 + i, BEGIN, LONG[i:]) for i in range(3)))


def test_records_come_back_in_order(tmp_path: Path) -> None:
    log = make(tmp_path / "removals", NBYTES, BEGIN, [], DiskFile)
    for number, body in enumerate((b"a", LONG, b"")):
        log.append(BEGIN + 2 + number, [body[:1], body[1:]])
    log.close()
    content = load(DiskFile(tmp_path / "removals"), NBYTES)
    assert not content.damaged
    assert [content.bodies[BEGIN + i] for i in range(5)] == [b"", b"", b"a", LONG, b""]


def test_a_full_log_says_so_and_stays_whole(tmp_path: Path) -> None:
    log = make(tmp_path / "removals", NBYTES, BEGIN, [b"kept"], DiskFile)
    with pytest.raises(LogFull):
        log.append(BEGIN + 3, [b"x" * NBYTES])
    log.append(BEGIN + 3, [b"y"])
    log.close()
    content = load(DiskFile(tmp_path / "removals"), NBYTES)
    assert not content.damaged and content.bodies[BEGIN + 3] == b"y" and content.bodies[BEGIN + 2] == b"kept"


@pytest.mark.parametrize("sectors", range(3))
def test_a_torn_end_is_not_damage(sectors: int) -> None:
    """Only the first sectors of the last record, or only the last ones, reached the device."""
    whole = encode_record(BEGIN + 2, BEGIN, LONG)
    assert len(whole) == 3 * SECTOR_BYTES
    first = whole[: sectors * SECTOR_BYTES].ljust(len(whole), b"\0")
    last = whole[sectors * SECTOR_BYTES :].rjust(len(whole), b"\0")
    for torn in (first, last) if sectors else (first,):
        content = read_log(text(encode_opening(BEGIN), torn))
        assert not content.damaged
        assert content.end == 2 * SECTOR_BYTES


def test_any_turned_byte_of_a_record_is_harmless_or_seen() -> None:
    sound = read_log(three())
    log = three()
    for at in range(0, sound.end, 7):
        log[at] ^= 64
        content = read_log(log)
        assert content.damaged or content.bodies == sound.bodies or at < 2 * SECTOR_BYTES, f"byte {at}"
        log[at] ^= 64


def test_damage_in_the_middle_names_what_is_lost() -> None:
    log = three()
    log[2 * SECTOR_BYTES + 100] ^= 1
    content = read_log(log)
    assert content.lost == {BEGIN + 2}
    assert content.bodies.keys() >= {BEGIN + 3, BEGIN + 4}


def test_damage_at_the_end_cannot_be_told_from_more(tmp_path: Path) -> None:
    log = three()
    log[read_log(three()).end - 8000] ^= 1
    assert read_log(log).lost is None
    assert read_log(text()).lost is None, "a log is never empty"
    half = memoryview(bytearray(three()))
    half[2 * SECTOR_BYTES : 5 * SECTOR_BYTES] = bytes(3 * SECTOR_BYTES)
    assert read_log(half).lost == {BEGIN + 2}, "a hole in the middle is no end"


def test_either_opening_record_may_be_lost() -> None:
    for at in (10, SECTOR_BYTES + 10):
        log = three()
        log[at] ^= 1
        assert not read_log(log).damaged


def test_a_new_log_takes_the_place_of_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "removals"
    make(path, NBYTES, BEGIN, [b"old"], DiskFile).close()

    class Broken(DiskFile):
        def pwrite(self, data: memoryview, offset: int) -> int:
            raise OSError(5, "no")

    with pytest.raises(OSError):
        make(path, NBYTES, BEGIN + 10, [b"new"], Broken)
    assert load(DiskFile(path), NBYTES).bodies[BEGIN + 2] == b"old"
    make(path, NBYTES, BEGIN + 10, [b"new"], DiskFile).close()
    assert load(DiskFile(path), NBYTES).bodies == {BEGIN + 10: b"", BEGIN + 11: b"", BEGIN + 12: b"new"}


def header(number: int, generation: int, *, group: str = "g", salt: str = "s", epoch: int = 1) -> SlotHeader:
    return SlotHeader(Namespace(group, 100, 16), epoch, salt, bytes([number]) * 16, generation, 0)


def test_an_index_is_the_same_after_it_was_written_and_read() -> None:
    index = RemovalIndex()
    space = Namespace("g", 100, 16)
    index.add(Removal(10, space, b"\1" * 16 + b"\2" * 16, salt="s"))
    index.add(Removal(12, space, b"\2" * 16, salt="s"))
    index.add(Removal(20, group="h"))
    index.add(Removal(30, group="g", salt="t", epoch=3))
    index.add(Removal(40, salt="u"))
    again = RemovalIndex()
    again.merge(b"".join(index.encode()))
    for one in (index, again):
        assert one.greatest == 40
        assert one.covers(header(1, 10)) and not one.covers(header(1, 11))
        assert one.covers(header(2, 12)) and not one.covers(header(2, 13)) and not one.covers(header(3, 1))
        assert not one.covers(header(1, 5, salt="other")), "another tenant's"
        assert one.covers(header(9, 20, group="h", salt="any")) and not one.covers(header(9, 21, group="h"))
        assert one.covers(header(9, 30, salt="t", epoch=2)) and not one.covers(header(9, 30, salt="t", epoch=3))
        assert one.covers(header(9, 40, group="x", salt="u"))

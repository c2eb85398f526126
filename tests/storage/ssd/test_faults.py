"""Devices that fail, stop short, lie or hang: misses and counters, and the others go on."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.ssd.base import DeviceState
from kvstrata.storage.ssd.faults import Faults
from kvstrata.storage.ssd.log import DeviceConfig, Limits, SsdLog
from kvstrata.storage.ssd.raw_file import DiskFile, RawFile
from tests.storage.ssd.stores import BLOCK_BYTES, DEVICE_BYTES, Store, key, versions_of
from tests.waiting import until

LOADED, CORRUPT, READ_ERROR = BlockStatus.LOADED, BlockStatus.CORRUPT, BlockStatus.READ_ERROR


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pair(tmp_path: Path, **options: object) -> tuple[Store, Faults, dict[bytes, bytes]]:
    """Two devices with blocks on both; what goes wrong goes wrong on the second."""
    faults = Faults(tmp_path / "b")
    store = Store([tmp_path / "a", tmp_path / "b"], open_file=faults.open_file, **options).scan()  # type: ignore[arg-type]
    versions = versions_of(range(60))
    assert all(store.write(versions).values())
    assert {device_of(store, name) for name in versions} == {0, 1}
    return store, faults, versions


def device_of(store: Store, name: bytes) -> int:
    return store.blocks[name].slab.device  # type: ignore[attr-defined,no-any-return]


def second(store: Store) -> DeviceState:
    return store.log.devices()[1]


def check_reads(store: Store, versions: dict[bytes, bytes], broken: BlockStatus, **options: float) -> None:
    """The first device's blocks are right, the second's are misses of one kind."""
    for name, (status, data) in zip(versions, store.read(list(versions), **options), strict=True):
        if device_of(store, name):
            assert status == broken
        else:
            assert (status, data) == (LOADED, versions[name])


@pytest.mark.parametrize(("error", "kind"), [(errno.EIO, "eio"), (errno.ENOSPC, "enospc"), (errno.EROFS, "read_only")])
def test_errors_are_misses_and_counted_by_kind(tmp_path: Path, error: int, kind: str) -> None:
    store, faults, versions = pair(tmp_path, limits=Limits(errors_in_a_row=1000))
    faults.read_errno = faults.write_errno = error
    check_reads(store, versions, READ_ERROR)
    later = store.write(versions_of(range(60, 120)))
    assert 0 < sum(later.values()) < 60
    assert second(store).counts[kind] > 1
    assert second(store).state == "serving"
    faults.read_errno = faults.write_errno = 0
    check_reads(store, versions, LOADED)
    store.close()


def test_errors_in_a_row_take_a_device_out(tmp_path: Path) -> None:
    store, faults, versions = pair(tmp_path)
    faults.read_errno = errno.EIO
    for _ in range(8):
        check_reads(store, versions, READ_ERROR)
    assert second(store).state == "failed" and "in a row failed" in second(store).problem
    faults.read_errno = 0
    before = faults.operations
    check_reads(store, versions, READ_ERROR)
    written = store.write(versions_of(range(200, 260)))
    assert any(written.values()) and not all(written.values())
    assert faults.operations == before, "nothing asks a device that is out"
    assert store.log.devices()[0].state == "serving"
    assert store.remove([key(200)]), "recorded on the one that serves"
    store.close()


def test_a_failed_flush_takes_the_device_out_and_says_not_durable(tmp_path: Path) -> None:
    store, faults, _ = pair(tmp_path)
    faults.flush_errno = errno.EIO
    blocks = dict(store.blocks)
    written = store.write(versions_of(range(60, 120)))
    assert {device_of(store, name) for name, good in written.items() if good} == {0}
    assert second(store).state == "failed" and "flush" in second(store).problem
    assert blocks
    store.close()


@pytest.mark.parametrize("block_bytes", [10_000, 200_000])
def test_short_transfers_are_completed(tmp_path: Path, block_bytes: int) -> None:
    faults = Faults()
    faults.halves = True
    store = Store([tmp_path], open_file=faults.open_file, block_bytes=block_bytes).scan()
    versions = versions_of(range(5), nbytes=block_bytes)
    assert all(store.write(versions).values())
    assert store.read(list(versions)) == [(LOADED, data) for data in versions.values()]
    store.close()


def test_transfers_that_do_not_go_on_are_errors(tmp_path: Path) -> None:
    store, faults, versions = pair(tmp_path, limits=Limits(errors_in_a_row=1000))
    faults.ends = True
    check_reads(store, versions, READ_ERROR)
    assert not all(store.write(versions_of(range(60, 120))).values())
    assert second(store).counts["short"] > 1
    store.close()


def test_turned_bits_are_all_seen(tmp_path: Path) -> None:
    """One bit in each operation: at least one block of every run is bad, and no bad one is handed over."""
    store, faults, versions = pair(tmp_path)
    faults.flips = True
    names = [name for name in versions if device_of(store, name)]
    for name in names:
        assert store.read([name])[0][0] == CORRUPT
    for _ in range(5):
        for name, (status, data) in zip(names, store.read(names), strict=True):
            assert status == CORRUPT or data == versions[name]
    assert second(store).state == "serving"
    store.close()


def test_a_stuck_device_holds_nobody_up(tmp_path: Path) -> None:
    clock = Clock()
    store, faults, versions = pair(tmp_path, clock=clock)
    faults.stall()
    into = {name: bytearray(BLOCK_BYTES) for name in versions}

    def late() -> None:
        clock.now += 1.0  # the deadline passes while the device is silent

    threading.Timer(0.1, late).start()
    names = list(versions)
    statuses = store.log.read(
        [store.blocks[name] for name in names], [memoryview(into[name]) for name in names], timeout_s=0.2
    )
    assert {device_of(store, name) for name, s in zip(names, statuses, strict=True) if s == LOADED} == {0}
    assert "stalled" in second(store).problem and second(store).state == "serving"
    # Now it is known to be slow: asked no more, so no deadline has to pass.
    check_reads(store, versions, READ_ERROR, timeout_s=60.0)
    assert second(store).counts["refused"] and second(store).counts["late"]
    for name in names:
        into[name][:] = b"z" * BLOCK_BYTES  # the memory is somebody else's now
    faults.resume()
    until(lambda: not second(store).problem)
    check_reads(store, versions, LOADED)
    for name in names:
        assert into[name] == b"z" * BLOCK_BYTES, "a late thread wrote into memory of another"
    store.close()


def test_a_device_that_never_answers_is_taken_out(tmp_path: Path) -> None:
    clock = Clock()
    store, faults, versions = pair(tmp_path, clock=clock)
    names = [name for name in versions if device_of(store, name)]
    faults.stall()
    payloads = {name: bytearray(versions[name]) for name in names}
    items = []
    for name in names[:4]:
        block = store.blocks[name]
        from tests.storage.ssd.stores import header_of

        items.append((block, header_of(block), memoryview(payloads[name])))
    threading.Timer(0.1, lambda: setattr(clock, "now", clock.now + 6.0)).start()
    assert store.log.write(items) == [False] * 4, "returns when the device is out, not before"
    assert second(store).state == "failed" and "not come back" in second(store).problem
    check_reads(store, versions, READ_ERROR)
    assert store.remove([key(1)])
    store.close()
    faults.resume()


def test_a_device_that_cannot_record_removals_is_taken_out(tmp_path: Path) -> None:
    store, faults, _ = pair(tmp_path)
    faults.write_errno = errno.EIO
    assert store.remove([key(1)]), "the other one has it"
    assert second(store).state == "failed"
    store.close()
    store = Store([tmp_path / "a", tmp_path / "b"]).scan()
    assert key(1) not in store.blocks and len(store.blocks) == 59
    store.close()


def test_with_no_device_nothing_can_be_recorded(tmp_path: Path) -> None:
    faults = Faults()
    store = Store([tmp_path], open_file=faults.open_file).scan()
    store.write(versions_of(range(3)))
    faults.flush_errno = errno.EIO
    assert not store.remove([key(1)])
    assert not store.remove([key(2)])
    assert store.log.devices()[0].state == "failed"
    store.close()


def test_unreadable_headers_keep_removals_remembered(tmp_path: Path) -> None:
    """A header that cannot be read today must not bring its removed block back tomorrow."""
    store = Store([tmp_path]).scan()
    store.write(versions_of(range(10)))
    assert store.remove([key(1)])
    store.close()
    faults = Faults(seed=3)
    faults.rate = 0.5
    faults.read_errno = errno.EIO

    def open_extents(path: Path) -> RawFile:
        return faults.open_file(path) if path.name == "extents" else DiskFile(path)

    store = Store([tmp_path], open_file=open_extents, limits=Limits(errors_in_a_row=1000)).scan()
    assert store.report is not None and store.report.damaged
    store.close()
    store = Store([tmp_path]).scan()
    assert set(store.blocks) == {key(number) for number in range(10)} - {key(1)}
    store.close()


def test_a_device_that_cannot_be_opened_leaves_the_others(tmp_path: Path) -> None:
    store, _, versions = pair(tmp_path)
    on_a = {name for name in versions if not device_of(store, name)}
    store.close()

    def broken(path: Path) -> RawFile:
        if tmp_path / "b" in path.parents:
            raise OSError(errno.EIO, "Input/output error")
        return DiskFile(path)

    store = Store([tmp_path / "a", tmp_path / "b"], open_file=broken).scan()
    assert set(store.blocks) == on_a
    assert second(store).state == "failed" and "could not be opened" in second(store).problem
    assert store.log.arena.bytes_total == 8 * store.log.arena.slab_bytes
    store.close()
    with pytest.raises(ConfigError, match="could not be opened"):
        SsdLog.open([DeviceConfig(tmp_path / "b", DEVICE_BYTES)], node_id="node", open_file=broken)


def test_without_o_direct_files_are_buffered_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    real = os.open

    def refusing(path: object, flags: int, *more: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("kvstrata.storage.ssd.raw_file.os.open", refusing)
    store = Store([tmp_path]).scan()
    versions = versions_of(range(5))
    assert all(store.write(versions).values())
    assert store.read(list(versions)) == [(LOADED, data) for data in versions.values()]
    assert not store.log.devices()[0].direct
    store.close()

"""The store on real files: what is written is there after a restart, or surely gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.ssd.base import SECTOR_BYTES, Removal
from kvstrata.storage.ssd.log import DeviceConfig, SsdLog
from kvstrata.storage.ssd.opening import extent_bytes_for, removal_bytes_for
from tests.storage.ssd.stores import BLOCK_BYTES, DEVICE_BYTES, EXTENT_BYTES, Store, key, payload, versions_of

LOADED, CORRUPT, READ_ERROR = BlockStatus.LOADED, BlockStatus.CORRUPT, BlockStatus.READ_ERROR


def filled(folders: list[Path], numbers: range = range(20), **options: int) -> dict[bytes, bytes]:
    """A store that was written and closed."""
    store = Store(folders, **options).scan()
    versions = versions_of(numbers, nbytes=options.get("block_bytes", BLOCK_BYTES))
    assert all(store.write(versions).values())
    store.close()
    return versions


def everything(store: Store, versions: dict[bytes, bytes]) -> None:
    assert set(store.blocks) == set(versions)
    assert store.read(list(versions)) == [(LOADED, data) for data in versions.values()]


@pytest.mark.parametrize("block_bytes", [1, 4096, 10_000, 65_536])
def test_what_is_written_is_there_after_a_restart(tmp_path: Path, block_bytes: int) -> None:
    versions = filled([tmp_path / "a", tmp_path / "b"], block_bytes=block_bytes)
    store = Store([tmp_path / "b", tmp_path / "a"], block_bytes=block_bytes).scan()
    assert store.report is not None and store.report.blocks == 20 and not store.report.damaged
    everything(store, versions)
    store.log.arena.check()
    assert store.log.arena.next_generation() > max(one.header.generation for one in store.found)
    store.close()


def test_a_block_larger_than_a_buffer_goes_piece_by_piece(tmp_path: Path) -> None:
    big = {"block_bytes": (9 << 20) + 5, "extent_bytes": 32 << 20, "device_bytes": 65 << 20}
    versions = filled([tmp_path], range(3), **big)
    store = Store([tmp_path], **big).scan()
    everything(store, versions)
    block = store.blocks[key(1)]
    flip(tmp_path / "extents", block.offset + (8 << 20))
    assert [status for status, _ in store.read(list(versions))] == [LOADED, CORRUPT, LOADED]
    store.close()


def test_blocks_of_several_sizes_share_a_device(tmp_path: Path) -> None:
    store = Store([tmp_path]).scan()
    small, large = versions_of(range(5), nbytes=BLOCK_BYTES), versions_of(range(5, 8), nbytes=BLOCK_BYTES)
    assert all(store.write({**small, **large}).values())
    everything(store, {**small, **large})
    store.close()


def flip(file: Path, at: int, bit: int = 1) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ bit]))
        stream.flush()
        os.fsync(stream.fileno())


def test_no_byte_of_a_slot_can_change_unseen(tmp_path: Path) -> None:
    filled([tmp_path], range(3))
    store = Store([tmp_path]).scan()
    name = key(1)
    block = store.blocks[name]
    slot_bytes = block.slab.slot_bytes
    step = 61  # a prime, so that header, payload and padding are met at many positions
    for at in [*range(0, slot_bytes, step), slot_bytes - 1]:
        flip(tmp_path / "extents", block.offset + at)
        statuses = [status for status, _ in store.read([key(0), name, key(2)])]
        assert statuses == [LOADED, CORRUPT, LOADED], f"byte {at}"
        flip(tmp_path / "extents", block.offset + at)
    assert store.read([name])[0] == (LOADED, payload(name, 0, BLOCK_BYTES))
    assert store.log.devices()[0].counts["corrupt"] > 100
    store.close()


def test_damaged_headers_are_counted_and_not_found(tmp_path: Path) -> None:
    versions = filled([tmp_path])
    store = Store([tmp_path]).scan()
    offsets = [store.blocks[key(number)].offset for number in (3, 7)]
    store.close()
    for offset in offsets:
        flip(tmp_path / "extents", offset + 300)
    store = Store([tmp_path]).scan()
    assert store.report is not None and (store.report.blocks, store.report.damaged) == (18, 2)
    del versions[key(3)], versions[key(7)]
    everything(store, versions)
    store.close()


def test_a_damaged_shape_loses_its_extent_alone_and_for_good(tmp_path: Path) -> None:
    versions = filled([tmp_path], range(40))
    store = Store([tmp_path]).scan()
    extent = store.blocks[key(0)].slab
    gone = [block.hash for block in extent.blocks.values()]
    store.close()
    flip(tmp_path / "extents", extent.device_offset + 40)
    store = Store([tmp_path]).scan()
    everything(store, {name: data for name, data in versions.items() if name not in gone})
    store.write(versions_of(range(100, 140)))
    store.close()
    store = Store([tmp_path]).scan()
    assert not set(gone) & set(store.blocks), "headers of an earlier cut do not count"
    store.close()


@pytest.mark.parametrize("nbytes", [0, 100, EXTENT_BYTES + 5000])
def test_a_truncated_file_is_misses(tmp_path: Path, nbytes: int) -> None:
    versions = filled([tmp_path], range(30))
    store = Store([tmp_path]).scan()
    os.truncate(tmp_path / "extents", nbytes)
    for name, (status, data) in zip(versions, store.read(list(versions)), strict=True):
        assert status == READ_ERROR or (status, data) == (LOADED, versions[name])
    assert store.log.devices()[0].counts["short"]
    store.close()
    store = Store([tmp_path]).scan()
    for name in store.blocks:
        assert store.read([name])[0] in [(LOADED, versions[name]), (CORRUPT, bytes(BLOCK_BYTES))]
    assert (tmp_path / "extents").stat().st_size == 8 * EXTENT_BYTES
    store.close()


def test_a_missing_extent_file_is_an_empty_device(tmp_path: Path) -> None:
    filled([tmp_path])
    (tmp_path / "extents").unlink()
    store = Store([tmp_path]).scan()
    assert not store.blocks
    assert all(store.write(versions_of(range(3))).values())
    store.close()


def test_a_misplaced_or_foreign_slot_is_not_believed(tmp_path: Path) -> None:
    filled([tmp_path / "a"], range(3))
    filled([tmp_path / "b"], range(3))
    store = Store([tmp_path / "a"]).scan()
    first, second = store.blocks[key(0)], store.blocks[key(1)]
    whole = (tmp_path / "a" / "extents").read_bytes()
    with (tmp_path / "a" / "extents").open("r+b") as stream:
        stream.seek(second.offset)
        stream.write(whole[first.offset : first.offset + first.slab.slot_bytes])
        os.fsync(stream.fileno())
    assert [status for status, _ in store.read([key(0), key(1)])] == [LOADED, CORRUPT]
    store.close()
    shutil.copy(tmp_path / "b" / "extents", tmp_path / "a" / "extents")
    store = Store([tmp_path / "a"]).scan()
    assert not store.blocks
    store.close()


def test_a_slot_that_landed_elsewhere_is_not_found_there(tmp_path: Path) -> None:
    versions = filled([tmp_path], range(3))
    store = Store([tmp_path]).scan()
    first, last = store.blocks[key(0)], store.blocks[key(2)]
    store.close()
    with (tmp_path / "extents").open("r+b") as stream:
        stream.seek(first.offset)
        slot = stream.read(first.slab.slot_bytes)
        stream.seek(last.offset + last.slab.slot_bytes)
        stream.write(slot)
        os.fsync(stream.fileno())
    store = Store([tmp_path]).scan()
    assert store.report is not None and (store.report.blocks, store.report.stale) == (3, 1)
    everything(store, versions)
    store.close()


def test_numbers_of_a_start_are_greater_than_all_before(tmp_path: Path) -> None:
    """Also when nothing is left that has one: removals that are still remembered name them."""
    store = Store([tmp_path]).scan()
    store.write(versions_of(range(3)))
    assert store.remove([key(number) for number in range(3)])
    last = store.log.arena.next_generation()
    store.close()
    store = Store([tmp_path])
    assert store.log.arena.next_generation() > last
    store.close()


# ---------------------------------------------------------------------- removals


def test_removed_blocks_stay_removed(tmp_path: Path) -> None:
    versions = filled([tmp_path])
    store = Store([tmp_path]).scan()
    assert store.remove([key(1), key(2)])
    store.close()
    for _ in range(2):
        store = Store([tmp_path]).scan()
        assert set(store.blocks) == set(versions) - {key(1), key(2)}
        store.close()


def test_a_stale_header_does_not_come_back_after_a_removal(tmp_path: Path) -> None:
    """Evicted from one slot, stored in another, removed: the first slot still says that it has it."""
    store = Store([tmp_path]).scan()
    store.write(versions_of(range(3)))
    old = store.blocks[key(1)]
    store.evict(key(1))
    store.write(versions_of(range(50, 51)))  # takes the slot's number, so that the next one is elsewhere
    store.evict(key(50))
    taken = store.admit(key(99), b"x" * BLOCK_BYTES)
    store.write(versions_of(range(1, 2)))
    assert taken is not None and store.blocks[key(1)].slot != old.slot
    assert store.remove([key(1)])
    store.close()
    store = Store([tmp_path]).scan()
    assert key(1) not in store.blocks
    store.close()


def test_a_block_stored_again_after_its_removal_is_found(tmp_path: Path) -> None:
    store = Store([tmp_path]).scan()
    store.write(versions_of(range(3)))
    assert store.remove([key(1)])
    store.write(versions_of(range(1, 2), version=1))
    store.close()
    for _ in range(3):
        store = Store([tmp_path]).scan()
        assert store.read([key(1)]) == [(LOADED, payload(key(1), 1, BLOCK_BYTES))]
        store.close()


def test_the_newest_of_a_key_is_found(tmp_path: Path) -> None:
    store = Store([tmp_path / "a", tmp_path / "b"]).scan()
    for version in range(4):
        store.blocks.pop(key(1), None)  # the slot stays taken
        store.write(versions_of(range(1, 2), version=version))
    store.close()
    store = Store([tmp_path / "a", tmp_path / "b"]).scan()
    assert store.report is not None and store.report.stale == 3
    assert store.read([key(1)]) == [(LOADED, payload(key(1), 3, BLOCK_BYTES))]
    store.close()


def test_scopes_are_removed_whole(tmp_path: Path) -> None:
    store = Store([tmp_path]).scan()
    store.write(versions_of(range(4)), salt="a")
    store.write(versions_of(range(4, 8)), salt="b")
    below = store.log.arena.next_generation()
    assert store.log.record([Removal(below, salt="a")])
    store.write(versions_of(range(8, 10)), salt="a")
    store.close()
    store = Store([tmp_path]).scan()
    assert set(store.blocks) == {key(number) for number in range(4, 10)}
    below = store.log.arena.next_generation()
    assert store.log.record([Removal(below, group="another"), Removal(below, group="model", epoch=0)])
    assert store.log.record([Removal(below, group="model", salt="b", epoch=1)])
    store.close()
    store = Store([tmp_path]).scan()
    assert set(store.blocks) == {key(8), key(9)}
    store.close()


def test_erased_slots_hold_nothing(tmp_path: Path) -> None:
    store = Store([tmp_path]).scan()
    versions = versions_of(range(6))
    store.write(versions)
    places = [(block.slab, block.slot) for name in (key(1), key(2), key(4)) if (block := store.blocks[name])]
    for name in (key(1), key(2), key(4)):
        store.evict(name)
    assert store.log.erase(places)  # type: ignore[arg-type]
    on_disk = (tmp_path / "extents").read_bytes()
    for number in range(6):
        assert (payload(key(number), 0, BLOCK_BYTES) in on_disk) == (number not in (1, 2, 4))
    store.close()
    store = Store([tmp_path]).scan()
    assert set(store.blocks) == {key(0), key(3), key(5)}
    store.close()


@pytest.mark.parametrize("harm", ["flip", "truncate", "unlink", "zero"])
def test_a_harmed_removal_log_brings_nothing_back(tmp_path: Path, harm: str) -> None:
    filled([tmp_path])
    store = Store([tmp_path]).scan()
    assert store.remove([key(1)])
    store.close()
    file = tmp_path / "removals"
    match harm:
        case "flip":
            flip(file, 2 * SECTOR_BYTES + 90)
        case "truncate":
            os.truncate(file, 2 * SECTOR_BYTES)
        case "unlink":
            file.unlink()
        case "zero":
            file.write_bytes(bytes(file.stat().st_size))
    store = Store([tmp_path]).scan()
    assert not store.blocks, "any block of before might have been removed"
    versions = versions_of(range(30, 33))
    assert all(store.write(versions).values())
    assert store.remove([key(31)])
    store.close()
    store = Store([tmp_path]).scan()
    assert set(store.blocks) == {key(30), key(32)}
    store.close()


def test_what_one_removal_log_lost_another_has(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    versions = filled(folders)
    store = Store(folders).scan()
    assert store.remove([key(1)]) and store.remove([key(2)])
    store.close()
    flip(tmp_path / "a" / "removals", 2 * SECTOR_BYTES + 90)
    store = Store(folders).scan()
    assert set(store.blocks) == set(versions) - {key(1), key(2)}
    store.close()


def test_a_log_that_fills_up_is_compacted_while_blocks_come_and_go(tmp_path: Path) -> None:
    store = Store([tmp_path]).scan()
    versions = versions_of(range(10))
    store.write(versions)
    removed = 0
    for round_ in range(12):
        for number in range(1000 + round_ * 10, 1010 + round_ * 10):
            removed += store.remove([key(number)])
        store.log._removals.tend()
    assert removed == 120, "none was refused for want of room"
    assert store.remove([key(3)])
    assert store.log.devices()[0].state == "serving"
    store.close()
    store = Store([tmp_path]).scan()
    assert set(store.blocks) == set(versions) - {key(3)}
    store.close()


def test_compaction_blanks_what_it_forgets(tmp_path: Path) -> None:
    """So many different removals that folding them is not enough."""
    store = Store([tmp_path]).scan()
    versions = versions_of(range(10))
    store.write(versions)
    assert store.remove([key(3)])
    many = b"".join(key(number) for number in range(1000, 4500))
    assert store.log.record([Removal(store.log.arena.next_generation(), store.namespace, many, salt="")])
    assert store.log.record([Removal(store.log.arena.next_generation(), store.namespace, many, salt="")]), "half full"
    while not store.log._removals.compactions:
        store.log._removals.tend()
    assert store.log._removals.devices[0].removals.fill < 0.1  # type: ignore[union-attr]
    store.evict(key(4))
    everything(store, {name: data for name, data in versions.items() if name not in (key(3), key(4))})
    store.close()
    store = Store([tmp_path]).scan()
    assert key(3) not in store.blocks
    store.close()


# ---------------------------------------------------------------------- opening


def test_a_directory_in_use_says_by_whom(tmp_path: Path) -> None:
    store = Store([tmp_path])
    with pytest.raises(ConfigError, match=rf"in use by node 'node', process {os.getpid()} on "):
        Store([tmp_path])
    store.close()
    store.close()
    Store([tmp_path]).close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kvstrata.storage.ssd.log import *;"
        f"config = DeviceConfig(Path(sys.argv[1]), {DEVICE_BYTES});"
        f"log = SsdLog.open([config], node_id='node', extent_bytes={EXTENT_BYTES});"
        "print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on"):
            Store([tmp_path])
        holder.kill()
        holder.wait(10)
        Store([tmp_path]).close()


def test_another_nodes_device_is_refused(tmp_path: Path) -> None:
    filled([tmp_path])
    with pytest.raises(ConfigError, match="belongs to node 'node', not 'other'"):
        SsdLog.open([DeviceConfig(tmp_path, DEVICE_BYTES)], node_id="other")
    Store([tmp_path]).close()  # and the lock was let go


def rewrite_superblocks(folder: Path, text: str | None, **fields: int) -> None:
    import xxhash

    for name in ("superblock.0", "superblock.1"):
        body = json.loads((folder / name).read_text().splitlines()[1])
        body.update(fields)
        line = json.dumps(body)
        (folder / name).write_text(text or f"{xxhash.xxh3_64_hexdigest(line.encode())}\n{line}\n")


def test_another_format_is_refused(tmp_path: Path) -> None:
    filled([tmp_path])
    rewrite_superblocks(tmp_path, None, format=9)
    with pytest.raises(ConfigError, match="has format 9, this version reads 1: start the kvstrata that wrote it"):
        Store([tmp_path])


def test_one_superblock_is_enough_and_none_is_refused(tmp_path: Path) -> None:
    versions = filled([tmp_path])
    os.truncate(tmp_path / "superblock.0", 10)
    store = Store([tmp_path]).scan()
    everything(store, versions)
    store.close()
    rewrite_superblocks(tmp_path, "nonsense")
    with pytest.raises(ConfigError, match="is damaged, and so is its copy"):
        Store([tmp_path])
    for name in ("superblock.0", "superblock.1"):
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="holds blocks and no superblock"):
        Store([tmp_path])
    (tmp_path / "extents").unlink()
    store = Store([tmp_path]).scan()
    assert not store.blocks
    store.close()


def test_a_device_may_grow_and_not_shrink(tmp_path: Path) -> None:
    versions = filled([tmp_path])
    with pytest.raises(ConfigError, match="give it at least"):
        Store([tmp_path], device_bytes=DEVICE_BYTES - EXTENT_BYTES)
    store = Store([tmp_path], device_bytes=DEVICE_BYTES + 2 * EXTENT_BYTES).scan()
    assert len(store.log.arena.slabs) == 10
    everything(store, versions)
    store.close()


def test_no_room_is_said_with_the_numbers(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    wanted = free.f_blocks * free.f_frsize * 2
    with pytest.raises(ConfigError, match="has no room for"):
        Store([tmp_path], device_bytes=wanted, extent_bytes=1 << 30)
    assert os.statvfs(tmp_path).f_bavail > free.f_bavail * 0.9, "what was taken is given back"
    Store([tmp_path]).close()


def test_a_start_that_was_interrupted_begins_anew(tmp_path: Path) -> None:
    filled([tmp_path])
    rewrite_superblocks(tmp_path, None, ready=False)
    store = Store([tmp_path]).scan()
    assert not store.blocks
    store.close()


def test_extent_sizes(tmp_path: Path) -> None:
    for nbytes, least, most in (
        (4 << 40, 1023 << 20, 1 << 30),
        (1 << 30, 113 << 20, 128 << 20),
        (200 << 20, 40 << 20, 64 << 20),
    ):
        size = extent_bytes_for(nbytes, None)
        assert least <= size <= most
        room = nbytes - removal_bytes_for(nbytes)
        assert room - room // size * size < nbytes // 256, "next to nothing is left over"
    with pytest.raises(ConfigError, match="too small"):
        extent_bytes_for(1 << 30, 4096)
    filled([tmp_path])
    with pytest.raises(ConfigError, match="all must have one size"):
        Store([tmp_path], extent_bytes=EXTENT_BYTES * 2)
    store = Store([tmp_path], extent_bytes=None).scan()
    assert store.log.arena.slab_bytes == EXTENT_BYTES
    store.close()


def test_a_device_that_was_away_starts_empty(tmp_path: Path) -> None:
    """What was removed meanwhile, nobody has told it."""
    folders = [tmp_path / "a", tmp_path / "b"]
    store = Store(folders).scan()
    versions = versions_of(range(60))
    assert all(store.write(versions).values())
    assert {block.slab.device for block in store.blocks.values()} == {0, 1}  # type: ignore[attr-defined]
    store.close()
    store = Store(folders[:1]).scan()
    on_a = set(store.blocks)
    store.log.record([Removal(store.log.arena.next_generation(), group="model")])
    store.close()
    Store(folders[:1]).scan().close()
    store = Store(folders).scan()
    assert on_a and not store.blocks
    store.close()

"""An encrypted device: its blocks come back, none of them can be read in its files, and other keys are refused."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.status import BlockStatus
from kvstrata.storage import durable_file
from kvstrata.storage.ssd.lanes import BUFFER_BYTES
from kvstrata.storage.ssd.slots import HEADER_BYTES
from kvstrata.storage.ssd.tenant_keys import TenantKeys
from tests.storage.ssd.stores import BLOCK_BYTES, Store, payload, versions_of

OPERATOR = bytes(range(32))
LOADED, CORRUPT = BlockStatus.LOADED, BlockStatus.CORRUPT


def keys_of(tmp_path: Path) -> TenantKeys:
    return TenantKeys(tmp_path / "ssd-keys", OPERATOR)


def encrypted(tmp_path: Path, keys: TenantKeys | None = None, **options: int) -> Store:
    return Store([tmp_path / "ssd"], keys=keys or keys_of(tmp_path), **options).scan()  # type: ignore[arg-type]


def pieces_on_disk(tmp_path: Path, versions: dict[bytes, bytes], step: int = 1000) -> int:
    """Blocks of which some piece of 32 bytes is in the device's files."""
    content = b"".join(path.read_bytes() for path in (tmp_path / "ssd").iterdir())
    return sum(
        any(data[at : at + 32] in content for at in range(0, len(data) - 32, step)) for data in versions.values()
    )


@pytest.mark.parametrize("block_bytes", [1, 15, 4096, BLOCK_BYTES])
def test_blocks_come_back_after_a_restart_and_are_not_in_the_files(tmp_path: Path, block_bytes: int) -> None:
    store = encrypted(tmp_path, block_bytes=block_bytes)
    versions = versions_of(range(20), nbytes=block_bytes)
    assert all(store.write(versions, "tenant").values())
    assert store.read(list(versions)) == [(LOADED, data) for data in versions.values()]
    store.close()
    if block_bytes > 32:
        assert pieces_on_disk(tmp_path, versions) == 0
    again = encrypted(tmp_path, block_bytes=block_bytes)
    assert again.read(list(versions)) == [(LOADED, data) for data in versions.values()]
    again.close()


def test_the_files_of_a_device_without_keys_show_the_blocks(tmp_path: Path) -> None:
    """What the test above would see without encryption."""
    store = Store([tmp_path / "ssd"]).scan()
    versions = versions_of(range(20))
    store.write(versions)
    store.close()
    assert pieces_on_disk(tmp_path, versions) == 20


def test_a_block_larger_than_a_buffer(tmp_path: Path) -> None:
    nbytes = 2 * BUFFER_BYTES + 12_345
    options = {"block_bytes": nbytes, "device_bytes": 40 << 20, "extent_bytes": 8 << 20}
    store = encrypted(tmp_path, **options)
    versions = versions_of(range(2), nbytes=nbytes)
    assert all(store.write(versions, "tenant").values())
    assert store.read(list(versions)) == [(LOADED, data) for data in versions.values()]
    store.close()
    assert pieces_on_disk(tmp_path, versions, step=100_000) == 0


def test_equal_payloads_look_different_wherever_they_are(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    same = payload(b"same", 0, BLOCK_BYTES)
    names = list(versions_of(range(6)))
    assert all(store.write(dict.fromkeys(names[:3], same), "one").values())
    assert all(store.write(dict.fromkeys(names[3:], same), "two").values())
    blocks = [store.blocks[name] for name in names]
    store.close()
    content = (tmp_path / "ssd" / "extents").read_bytes()
    seen = {content[block.offset + HEADER_BYTES : block.offset + HEADER_BYTES + BLOCK_BYTES] for block in blocks}
    assert len(seen) == 6 and same not in seen


def test_no_byte_of_a_payload_can_change_unseen(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    versions = versions_of(range(1))
    (name,) = versions
    store.write(versions, "tenant")
    block = store.blocks[name]
    with (tmp_path / "ssd" / "extents").open("r+b") as file:
        for at in range(0, block.slab.slot_bytes, 97):
            file.seek(block.offset + at)
            (byte,) = file.read(1)
            file.seek(block.offset + at)
            file.write(bytes([byte ^ 4]))
            file.flush()
            assert store.read([name])[0][0] == CORRUPT, at
            file.seek(block.offset + at)
            file.write(bytes([byte]))
            file.flush()
    assert store.read([name]) == [(LOADED, versions[name])]
    store.close()


def test_a_tenant_whose_key_is_gone_is_misses_and_others_are_not(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    store = encrypted(tmp_path, keys)
    gone, stays, new = versions_of(range(5)), versions_of(range(5, 10)), versions_of(range(10, 15))
    store.write(gone, "gone")
    store.write(stays, "stays")
    keys.retire("gone")
    keys.save()
    statuses = store.read([*gone, *stays])
    assert [status for status, _ in statuses] == [CORRUPT] * 5 + [LOADED] * 5
    assert store.log.devices()[0].counts["no_key"] == 5
    assert all(store.write(new, "gone").values())  # the tenant is back, with another key
    assert [status for status, _ in store.read([*gone, *new])] == [CORRUPT] * 5 + [LOADED] * 5
    store.close()
    again = encrypted(tmp_path)
    assert [status for status, _ in again.read([*gone, *new])] == [CORRUPT] * 5 + [LOADED] * 5
    assert all(data == bytes(BLOCK_BYTES) for _, data in again.read(list(gone)))
    again.close()


def test_keys_of_tenants_without_blocks_go_at_a_start(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    store.write(versions_of(range(3)), "idle")
    kept = versions_of(range(3, 6))
    store.write(kept, "kept")
    store.remove(list(versions_of(range(3))), "idle")
    store.close()
    assert keys_of(tmp_path).count == 2
    again = encrypted(tmp_path)
    assert [status for status, _ in again.read(list(kept))] == [LOADED] * 3
    again.close()
    keys = keys_of(tmp_path)
    assert keys.count == 1 and keys.key("kept") is not None


def test_a_key_that_cannot_be_kept_holds_back_its_tenant_alone(tmp_path: Path) -> None:
    full = False

    def replace(file: Path, content: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, "no space")
        durable_file.replace(file, content)

    store = encrypted(tmp_path, TenantKeys(tmp_path / "ssd-keys", OPERATOR, replace=replace))
    assert all(store.write(versions_of(range(3)), "known").values())
    full = True
    assert not any(store.write(versions_of(range(3, 6)), "new").values())
    assert all(store.write(versions_of(range(6, 9)), "known").values())
    full = False
    assert all(store.write(versions_of(range(3, 6)), "new").values())
    store.close()


# ---------------------------------------------------------------------- whose keys


def test_a_device_that_is_not_encrypted_is_refused_with_a_key(tmp_path: Path) -> None:
    Store([tmp_path / "ssd"]).scan().close()
    with pytest.raises(ConfigError, match="not encrypted: start without --ssd-key-file, or move its files away"):
        encrypted(tmp_path)
    assert not (tmp_path / "ssd-keys").exists()
    Store([tmp_path / "ssd"]).scan().close()  # and as it was


def test_an_encrypted_device_is_refused_without_a_key(tmp_path: Path) -> None:
    encrypted(tmp_path).close()
    with pytest.raises(ConfigError, match="is encrypted: give --ssd-key-file as before"):
        Store([tmp_path / "ssd"])


def test_other_keys_than_a_devices_are_refused(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    versions = versions_of(range(5))
    store.write(versions, "tenant")
    store.close()
    lost = (tmp_path / "ssd-keys").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"other keys than those in .*ssd-keys: put that file back"):
        encrypted(tmp_path)
    assert not (tmp_path / "ssd-keys").exists()
    lost.rename(tmp_path / "ssd-keys")
    again = encrypted(tmp_path)
    assert again.read(list(versions)) == [(LOADED, data) for data in versions.values()]
    again.close()


def test_keys_are_kept_before_a_device_says_that_it_has_them(tmp_path: Path) -> None:
    """As after an end of the process right after its devices were laid out."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(ConfigError, match=r"cannot write .*ssd-keys: no space"):
        Store([tmp_path / "ssd"], keys=TenantKeys(tmp_path / "ssd-keys", OPERATOR, replace=full))
    Store([tmp_path / "ssd"], keys=keys_of(tmp_path)).close()
    assert keys_of(tmp_path).found
    encrypted(tmp_path).close()


def test_a_second_device_joins_the_same_keys(tmp_path: Path) -> None:
    encrypted(tmp_path).close()
    keys = keys_of(tmp_path)
    store = Store([tmp_path / "ssd", tmp_path / "second"], keys=keys).scan()
    assert all(store.write(versions_of(range(40)), "tenant").values())
    store.close()
    with pytest.raises(ConfigError, match="second is encrypted"):
        Store([tmp_path / "second"])

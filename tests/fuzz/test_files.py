"""Whatever the bytes of a file, its reader gives a value or says what to do: never another error, never nonsense.

Each file begins as a real one; bytes of it are turned, cut off, doubled or replaced.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.cli import settings, tenant_file
from kvstrata.proto.errors import KVError
from kvstrata.proto.keys import Namespace
from kvstrata.storage.eviction.quotas import QuotaBook
from kvstrata.storage.identity import DataDirectory
from kvstrata.storage.masters.policies import Policies, PolicyFile
from kvstrata.storage.ssd import removal_log, slots
from kvstrata.storage.ssd.base import SECTOR_BYTES, SlotHeader
from kvstrata.storage.ssd.log import SsdLog
from kvstrata.storage.ssd.opening import DeviceConfig
from kvstrata.storage.ssd.tenant_keys import TenantKeys

CI = pytest.param(150, id="ci")
LONG = pytest.param(4_000, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)])
COUNTS = pytest.mark.parametrize("count", [CI, LONG])

#: What people and broken disks put into files.
_STUFF = (b"", b"\x00", b"\xff\xfe", b"{}", b"[]", b"null", b"-1", b"1e999", b"NaN", b'"', b"\n", b"[" * 20_000, b": ")


def spoiled(text: bytes, chance: random.Random) -> bytes:
    """Another file, near to this one."""
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(6):
            case 0:
                text = text[:at]
            case 1 if text:
                turned = bytearray(text)
                turned[at % len(turned)] ^= 1 << chance.randrange(8)
                text = bytes(turned)
            case 2:
                text = text[:at] + chance.choice(_STUFF) + text[at:]
            case 3:
                text = text[:at] + chance.choice(_STUFF) + text[at + chance.randrange(40) :]
            case 4:
                text += text[at:]
            case _:
                text = chance.randbytes(chance.randrange(200))
    return text


def read_all(file: Path, read: Callable[[], object], seed: int, count: int) -> None:
    """Each spoiled form is read, or refused by an error that says something."""
    chance = random.Random(seed)
    sound = file.read_bytes()
    read()
    refused = 0
    for _ in range(count):
        file.write_bytes(spoiled(sound, chance))
        try:
            read()
        except KVError as error:
            assert str(error)
            refused += 1
    assert refused > count // 10, "spoiling it is noticed"
    file.write_bytes(sound)
    read()


@COUNTS
def test_policies(tmp_path: Path, seed: int, count: int) -> None:
    file = PolicyFile(tmp_path)
    file.save(Policies(QuotaBook().to_json(), {"model": 3}, (2, "m")))
    read_all(tmp_path / "policies.json", file.restored, seed, count)


@COUNTS
def test_identity(tmp_path: Path, seed: int, count: int) -> None:
    def read() -> None:
        directory = DataDirectory(tmp_path)
        directory.close()

    read()
    read_all(next(tmp_path.glob("*.json")), read, seed, count)


@COUNTS
def test_tenant_keys(tmp_path: Path, seed: int, count: int) -> None:
    file = tmp_path / "keys"
    keys = TenantKeys(file, b"k" * 32)
    keys.ensure(["a", ""])
    keys.save()
    read_all(file, lambda: TenantKeys(file, b"k" * 32), seed, count)


@COUNTS
def test_options(tmp_path: Path, seed: int, count: int) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("listen: 127.0.0.1:7400\nstate: /var/lib/state.db\nssd:\n  - /a=1GiB\ngrace: 5\n")
    read_all(file, lambda: settings.read_file(file), seed, count)


@COUNTS
def test_tenant_files(tmp_path: Path, seed: int, count: int) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("default:\n  dram: 1MiB\ntenants:\n  a:\n    dram: 1GiB\n    dram-floor: 10MiB\n")
    read_all(file, lambda: tenant_file.load(file.read_text(errors="replace"), str(file)), seed, count)


@pytest.mark.parametrize("count", [pytest.param(25, id="ci"), pytest.param(1000, id="long", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["superblock", "removals", "extents"])
def test_ssd_directory(tmp_path: Path, seed: int, count: int, name: str) -> None:
    """Damage of any kind: the device opens, with fewer blocks or none, or says what to do."""
    folder = tmp_path / "ssd"
    config = DeviceConfig(folder, 8 << 20)
    log = SsdLog.open([config], node_id="n", extent_bytes=1 << 20)
    log.close()
    file = next(path for path in sorted(folder.iterdir()) if path.name.startswith(name))
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept)
    chance = random.Random(seed)
    for _ in range(count):
        size = file.stat().st_size
        with file.open("r+b") as spoil:
            for _ in range(chance.randrange(1, 5)):
                spoil.seek(chance.randrange(max(1, size)) if chance.random() < 0.5 else chance.randrange(4096))
                spoil.write(chance.choice((*_STUFF, chance.randbytes(64))))
            spoil.truncate(chance.choice((size, size, max(0, size - 4096), 0)))
        try:
            again = SsdLog.open([config], node_id="n", extent_bytes=1 << 20)
        except KVError as error:
            assert str(error)
        else:
            try:
                again.scan(lambda *found: None)
            finally:
                again.close()
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)


@COUNTS
def test_headers_and_records(seed: int, count: int) -> None:
    """A checksum of 64 bits: what is read is what was written."""
    chance = random.Random(seed)
    log = removal_log.encode_opening(1) * 2 + removal_log.encode_record(2, 1, b"body" * 30)
    header = SlotHeader(Namespace("model", 4096, 16), 1, "salt", b"h" * 16, 7, 9, parent=b"p" * 16, index=3)
    sectors = [
        slots.encode_header(header, slots.Place(b"d" * 16, 1, 0, 2))[:SECTOR_BYTES],
        slots.encode_shape(slots.Shape(2 * SECTOR_BYTES, 1), b"d" * 16, 0)[:SECTOR_BYTES],
    ]
    for _ in range(count):
        content = removal_log.read_log(memoryview(spoiled(log, chance)))
        assert set(content.bodies.values()) <= {b"", b"body" * 30}
        for sector in sectors:
            other = spoiled(sector, chance)[:SECTOR_BYTES].ljust(SECTOR_BYTES, b"\x00")
            assert other == sector or slots.decode_header(other) is None
            assert other == sector or slots.decode_shape(other, b"d" * 16, 0, 1 << 20) in (None, slots.Shape())

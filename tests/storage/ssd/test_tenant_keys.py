"""The file of tenants' keys: kept before they are used, gone once retired, and opened by one operator's key only."""

from __future__ import annotations

import base64
import errno
import json
import threading
from pathlib import Path

import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.storage import durable_file
from kvstrata.storage.ssd.cipher import DataKey
from kvstrata.storage.ssd.tenant_keys import TenantKeys, read_key_file

OPERATOR = bytes(range(32))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ssd-keys"


def secret(keys: TenantKeys, salt: str) -> bytes | None:
    key = keys.key(salt)
    return key.secret if key is not None else None


def test_keys_are_the_same_after_a_restart(file: Path) -> None:
    keys = TenantKeys(file, OPERATOR)
    assert not keys.found and keys.key("a") is None
    keys.ensure(["a", "", "ünïcode"])
    again = TenantKeys(file, OPERATOR)
    assert again.found and again.ring == keys.ring and again.count == 3
    for salt in ("a", "", "ünïcode"):
        assert secret(again, salt) == secret(keys, salt) is not None
    assert len({secret(keys, salt) for salt in ("a", "", "ünïcode")}) == 3
    before = file.read_bytes()
    again.ensure(["a", ""])
    again.save()
    assert file.read_bytes() == before  # nothing new: nothing written


def test_neither_keys_nor_tenants_can_be_read_in_the_file(file: Path) -> None:
    keys = TenantKeys(file, OPERATOR)
    keys.ensure(["team-secret"])
    found = secret(keys, "team-secret")
    assert found is not None
    content = file.read_bytes()
    assert b"team-secret" not in content and found not in content and found.hex().encode() not in content
    assert OPERATOR not in content and file.stat().st_mode & 0o077 == 0


def test_another_operator_key_is_refused_with_advice(file: Path) -> None:
    TenantKeys(file, OPERATOR).ensure(["a"])
    with pytest.raises(ConfigError, match="give the key file that this node had before"):
        TenantKeys(file, bytes(32))


def test_a_flip_of_any_byte_of_the_file_is_noticed(file: Path) -> None:
    TenantKeys(file, OPERATOR).ensure(["a"])
    content = file.read_bytes()
    for at in range(len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ConfigError):
            TenantKeys(file, OPERATOR)
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(ConfigError):
            TenantKeys(file, OPERATOR)


def test_a_format_of_the_future_is_named(file: Path) -> None:
    TenantKeys(file, OPERATOR).ensure(["a"])
    line, _, sealed = file.read_bytes().partition(b"\n")
    file.write_bytes(json.dumps(json.loads(line) | {"format": 9}).encode() + b"\n" + sealed)
    with pytest.raises(ConfigError, match="format 9"):
        TenantKeys(file, OPERATOR)


def test_a_retired_key_is_gone_at_once_and_for_good_after_a_save(file: Path) -> None:
    keys = TenantKeys(file, OPERATOR)
    keys.ensure(["a", "b"])
    old = secret(keys, "a")
    keys.retire("a")
    assert keys.key("a") is None and keys.key("b") is not None
    assert secret(TenantKeys(file, OPERATOR), "a") == old  # not saved yet
    keys.save()
    assert TenantKeys(file, OPERATOR).key("a") is None
    keys.ensure(["a"])
    assert secret(keys, "a") not in (None, old)  # a tenant that comes back has a key of its own
    keys.retire(None)
    keys.save()
    assert TenantKeys(file, OPERATOR).count == 0


def test_idle_tenants_keys_go(file: Path) -> None:
    keys = TenantKeys(file, OPERATOR)
    keys.ensure(["a", "b", "c"])
    keys.keep_only({"b"})
    keys.save()
    again = TenantKeys(file, OPERATOR)
    assert again.count == 1 and again.key("b") is not None


class Disk:
    """Replaces files, or fails, or runs something in the midst of it."""

    def __init__(self) -> None:
        self.full = False
        self.meanwhile = lambda: None

    def __call__(self, file: Path, content: bytes) -> None:
        self.meanwhile()
        if self.full:
            raise OSError(errno.ENOSPC, "no space")
        durable_file.replace(file, content)


def test_a_key_that_could_not_be_kept_is_not_used(file: Path) -> None:
    disk = Disk()
    keys = TenantKeys(file, OPERATOR, replace=disk)
    keys.ensure(["a"])
    disk.full = True
    with pytest.raises(OSError, match="no space"):
        keys.ensure(["a", "b"])
    assert keys.key("b") is None and keys.key("a") is not None
    keys.retire("a")
    with pytest.raises(OSError, match="no space"):
        keys.save()
    disk.full = False
    keys.save()  # what failed is still to be done
    assert TenantKeys(file, OPERATOR).count == 0


def test_a_key_retired_while_the_file_is_written_is_not_kept(file: Path) -> None:
    disk = Disk()
    keys = TenantKeys(file, OPERATOR, replace=disk)
    keys.ensure(["a"])
    disk.meanwhile = lambda: keys.retire("a")
    keys.ensure(["b"])  # this file still has the key of "a"
    assert keys.key("a") is None
    disk.meanwhile = lambda: None
    keys.save()
    again = TenantKeys(file, OPERATOR)
    assert again.key("a") is None and secret(again, "b") == secret(keys, "b") is not None


def test_threads_that_want_the_same_tenant_get_one_key(file: Path) -> None:
    keys = TenantKeys(file, OPERATOR)
    got: list[DataKey | None] = []
    start = threading.Barrier(4)

    def want() -> None:
        start.wait(5)
        keys.ensure(["a"])
        got.append(keys.key("a"))

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(got) == 4 and len({key.secret for key in got if key is not None}) == 1
    assert secret(TenantKeys(file, OPERATOR), "a") == secret(keys, "a")


# ---------------------------------------------------------------------- the operator's file


@pytest.mark.parametrize(
    "text",
    [
        OPERATOR.hex().encode(),
        OPERATOR.hex().upper().encode() + b"\n",
        base64.b64encode(OPERATOR),
        b" " + base64.b64encode(OPERATOR) + b"\r\n",
    ],
)
def test_hex_and_base64_are_read(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(text)
    assert read_key_file(path) == OPERATOR


@pytest.mark.parametrize(
    "text", [b"", OPERATOR, OPERATOR[:31].hex().encode(), base64.b64encode(OPERATOR + b"x"), b"*" * 44, b"a" * 5000]
)
def test_what_is_no_key_is_refused_with_a_way_to_make_one(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="head -c 32 /dev/urandom"):
        read_key_file(path)


@pytest.mark.parametrize(
    ("mode", "good"), [(0o600, True), (0o400, True), (0o440, True), (0o604, False), (0o620, False)]
)
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int, good: bool) -> None:
    path = tmp_path / "key"
    path.write_text(OPERATOR.hex())
    path.chmod(mode)
    if good:
        assert read_key_file(path) == OPERATOR
    else:
        with pytest.raises(ConfigError, match="chmod 600"):
            read_key_file(path)


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read --ssd-key-file"):
        read_key_file(tmp_path / "none")

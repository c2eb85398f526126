"""Durable policy: what is kept, what is refused, and life with a disk that says no."""

from __future__ import annotations

import dataclasses
import random
import resource
import sqlite3
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.master.client_calls import ClientCalls
from kvstrata.master.hub import Hub
from kvstrata.master.journal import PENDING_MAX, Journal
from kvstrata.master.messages import (
    Save,
    SaveFallback,
    SaveGrants,
    SaveGroup,
    SaveNode,
    SavePolicy,
    SaveScope,
    SaveTombstone,
    Share,
    TenantPolicy,
)
from kvstrata.master.saved import Saved
from kvstrata.master.stores.sqlite import _SCHEMA, SCHEMA_VERSION, SqliteStore
from kvstrata.proto.errors import ConfigError, Unavailable
from kvstrata.proto.keys import Namespace

NS = Namespace("g/é", block_bytes=4096, block_tokens=16, hash_bytes=32, shard=3, shard_count=4)
NODE = SaveNode("n1", 1 << 40, 0, gone=False)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """No file of this process may grow past ``limit``: the kernel says EFBIG, as a full disk says ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs privileges; the size limit tests cover a refusing disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_what_is_saved_is_loaded_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    cluster = store.cluster_id()
    stone = SaveTombstone(7, NS, "salt\0é", bytes(range(64)), ("a", "b"))
    store.save([NODE, SaveGroup(NS, 3), stone, SaveTombstone(9, NS, "", bytes(32), ())])
    store.save([SaveNode("n1", 5, 6, gone=True)])
    store.close()
    again = SqliteStore(path)
    assert again.cluster_id() == cluster
    group = SaveGroup(Namespace(NS.group, 4096, 16, 32, 0, 4), 3)
    assert again.load() == Saved((SaveNode("n1", 5, 6, True),), (group,), (stone,), last_command=9, revision=2)
    again.save([SaveTombstone(7, NS, "salt\0é", bytes(64), ())])
    assert again.load().tombstones == () and again.load().last_command == 9
    again.close()


def test_memory_keeps_nothing() -> None:
    store = SqliteStore(None, cluster_id="mine")
    store.save([NODE])
    assert store.cluster_id() == "mine" and store.load().nodes == (NODE,)
    store.close()


def test_a_write_is_all_or_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s")
    with pytest.raises(OverflowError):
        store.save([NODE, SaveNode("n2", 1 << 70, 0, False)])
    store.save([])  # what was begun has been rolled back, whatever broke it
    with pytest.raises(Unavailable):
        store.save([NODE, SaveNode(None, 1, 1, False)])  # type: ignore[arg-type]
    assert store.load().nodes == ()
    store.save([NODE])
    store.close()


def test_the_store_of_another_cluster_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "s", "one").close()
    with pytest.raises(ConfigError, match="belongs to cluster one, not two"):
        SqliteStore(tmp_path / "s", "two")


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    SqliteStore(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    raw.close()
    with pytest.raises(ConfigError, match=f"schema version {SCHEMA_VERSION + 1}, this build knows {SCHEMA_VERSION}"):
        SqliteStore(path)
    raw = sqlite3.connect(path)
    assert raw.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION + 1
    raw.close()


def test_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"not a database, but long enough to have a header" * 100)
    with pytest.raises(ConfigError, match="is not one of ours"):
        SqliteStore(text)
    foreign = tmp_path / "foreign"
    with sqlite3.connect(foreign) as raw:
        raw.execute("CREATE TABLE songs (title TEXT)")
    raw.close()
    with pytest.raises(ConfigError, match="a database of something else"):
        SqliteStore(foreign)
    with pytest.raises(ConfigError, match="must exist and be writable"):
        SqliteStore(tmp_path / "missing" / "s")
    with pytest.raises(ConfigError):
        SqliteStore(tmp_path)


def test_a_store_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.master.stores.sqlite.LOCKED_S", 0.05)
    path = tmp_path / "s"
    SqliteStore(path).close()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigError, match="in use by another process"):
        SqliteStore(path)
    holder.close()


def test_rows_that_make_no_sense_are_an_error_with_advice(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s")
    store._connection.execute("INSERT INTO groups VALUES ('g', 0, 0, 99, 1, 0)")
    with pytest.raises(ConfigError, match="restore a copy"):
        store.load()
    store.close()


def test_a_full_disk_at_the_start(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(120 << 10))
    with pytest.raises(ConfigError, match="state store"):
        SqliteStore(small_disk / "state.db")


def test_a_full_disk_while_running_is_seen_and_outlived(small_disk: Path) -> None:
    store = SqliteStore(small_disk / "state.db")
    journal = Journal(store)
    number = 0
    while journal.flush() and number < 2000:
        number += 1
        journal.add([SaveNode(f"node-{number}-{'x' * 200}", 1, 1, False)])
    assert journal.failures and "full" in journal.problem()
    assert len(store.load().nodes) == number - 1, "what was in before is still in"
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert journal.flush() and not journal.problem()
    assert len(store.load().nodes) == number
    store.close()


def test_a_file_that_may_not_grow_is_seen_and_outlived(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    journal = Journal(store)
    wal = tmp_path / "state.db-wal"
    with file_size_limit(wal.stat().st_size):
        journal.add([NODE])
        assert not journal.flush() and not journal.flush()
        assert journal.failures == 2 and "1 rows wait" in journal.problem()
        journal.add([SaveNode("n1", 1, 2, gone=True)])
    assert journal.flush() and not journal.problem()
    assert store.load().nodes == (SaveNode("n1", 1, 2, gone=True),)
    store.close()


class RefusingStore(SqliteStore):
    """Refuses while told to."""

    refuses = False

    def save(self, writes: Iterable[Save], epoch: int = 0) -> None:
        if self.refuses:
            raise Unavailable("no")
        super().save(writes, epoch)


NODES = st.builds(SaveNode, st.sampled_from(["a", "b", "c"]), st.integers(0, 9), st.integers(0, 9), st.booleans())
STONES = st.builds(
    SaveTombstone, st.integers(1, 3), st.just(NS), st.just(""), st.just(bytes(32)), st.sampled_from([(), ("a",)])
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(NODES | STONES | st.just(SaveGroup(NS, 1)), st.booleans()), max_size=20))
def test_whatever_the_store_refused_the_last_version_of_each_row_gets_in(steps: list[tuple[Save, bool]]) -> None:
    store = RefusingStore(None)
    store.save([SaveGroup(NS, 0)])
    journal = Journal(store)
    for write, store.refuses in steps:
        journal.add([write])
        assert journal.flush() is not store.refuses
    store.refuses = False
    assert journal.flush()
    saved = store.load()
    nodes = {write.node_id: write for write, _ in steps if isinstance(write, SaveNode)}
    stones = {write.command: write for write, _ in steps if isinstance(write, SaveTombstone)}
    assert {node.node_id: node for node in saved.nodes} == nodes
    assert set(saved.tombstones) == {stone for stone in stones.values() if stone.waiting}
    store.close()


def test_a_row_that_changes_while_it_is_written_is_written_again() -> None:
    newer = SaveNode("n1", 2, 2, gone=True)

    class SlowStore(SqliteStore):
        def save(self, writes: Iterable[Save], epoch: int = 0) -> None:
            super().save(writes, epoch)
            if journal_of:
                journal_of.pop().add([newer])

    store = SlowStore(None)
    journal = Journal(store)
    journal_of = [journal]
    journal.add([NODE])
    assert journal.flush() and store.load().nodes == (NODE,)
    assert journal.flush() and store.load().nodes == (newer,)
    store.close()


def test_a_removal_that_cannot_be_remembered_for_an_absent_node_says_so() -> None:
    store = RefusingStore(None)
    store.save([SaveNode("away", 1, 1 << 30, gone=False)])
    hub = Hub(store, random.Random(0), grace_s=0.0)
    calls = ClientCalls(hub)
    opened = calls.open_namespace(NS)
    assert calls.remove(opened, "", bytes(32), deadline_s=0.0).unreached == ["away"]
    store.refuses = True
    with pytest.raises(Unavailable, match="away may not learn of it"):
        calls.remove(opened, "", bytes(32), deadline_s=0.0)
    store.close()


def test_what_waits_is_bounded() -> None:
    store = RefusingStore(None)
    store.refuses = True
    journal = Journal(store)
    journal.add(SaveNode(str(number), 1, 1, False) for number in range(PENDING_MAX + 5))
    assert journal.given_up == 5
    store.close()


POLICY = TenantPolicy("t\0é", dram_limit=1 << 40, ssd_limit=None, dram_floor=1 << 20)
SCOPE = SaveScope(11, "g/é", "t\0é", erase=True, epoch=None, waiting=("a",))


def test_tenants_grants_and_scopes_outlive_a_restart(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s")
    shares = (Share("t\0é", 5, None, 1, 0), Share("", None, 0, 0, 0))
    fallback = SaveFallback(TenantPolicy("", 0, 0), deny=True)
    scopes = [SCOPE, SaveScope(12, "g/é", None, erase=False, epoch=4, waiting=("b", "c"))]
    store.save([SavePolicy("t\0é", POLICY), SavePolicy("", TenantPolicy("", 1, 2, 0, 1)), fallback, *scopes])
    store.save([SaveGrants("n1", shares), SaveGrants("n2", shares[:1], Share("", 3, None))])
    store.close()
    again = SqliteStore(tmp_path / "s")
    saved = again.load()
    assert set(saved.policies) == {POLICY, TenantPolicy("", 1, 2, 0, 1)}
    assert saved.fallback == fallback and saved.scopes == tuple(scopes) and saved.last_command == 12
    assert {grants.node_id: set(grants.shares) for grants in saved.grants} == {
        "n1": set(shares),
        "n2": set(shares[:1]),
    }
    assert {grants.node_id: grants.fallback for grants in saved.grants} == {"n1": None, "n2": Share("", 3, None)}
    again.save([SavePolicy("", None), SaveGrants("n1", ()), dataclasses.replace(SCOPE, waiting=())])
    left = again.load()
    assert left.policies == (POLICY,) and left.scopes == (scopes[1],)
    assert [grants.node_id for grants in left.grants] == ["n2"]
    again.close()


def test_a_file_of_version_1_is_upgraded_and_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "s"
    raw = sqlite3.connect(path)
    raw.executescript(_SCHEMA + "PRAGMA user_version = 1; INSERT INTO facts VALUES ('cluster_id', 'old');")
    raw.execute("INSERT INTO nodes VALUES ('n1', ?, 0, 0)", (1 << 40,))
    raw.execute("INSERT INTO groups VALUES ('g/é', 4096, 16, 32, 4, 3)")
    raw.commit()
    raw.close()
    store = SqliteStore(path)
    assert store.cluster_id() == "old" and store.load().nodes == (NODE,)
    store.save([SavePolicy("t\0é", POLICY), SCOPE])
    store.close()
    again = SqliteStore(path).load()
    assert again.policies == (POLICY,) and again.scopes == (SCOPE,) and again.groups[0].epoch == 3


def test_an_upgrade_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "s"
    raw = sqlite3.connect(path)
    raw.executescript(_SCHEMA + "PRAGMA user_version = 1; CREATE TABLE scopes (other TEXT);")
    raw.close()
    with pytest.raises(ConfigError, match="scopes"):
        SqliteStore(path)
    raw = sqlite3.connect(path)
    assert raw.execute("PRAGMA user_version").fetchone()[0] == 1
    assert not raw.execute("SELECT name FROM sqlite_master WHERE name = 'policies'").fetchall()
    raw.close()

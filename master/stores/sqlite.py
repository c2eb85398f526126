"""Durable policy: roster, namespaces, removals, tenants, grants, cluster id. One SQLite file, or memory.

What a store keeps is small and rarely written, so every write is flushed (``synchronous=FULL``). Blocks
are not in here: their truth is on the nodes.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvstrata.master.messages import (
    Save,
    SaveFallback,
    SaveGrants,
    SaveGroup,
    SaveNode,
    SavePolicy,
    SaveReplicas,
    SaveScope,
    SaveTombstone,
    Share,
    TenantPolicy,
)
from kvstrata.master.saved import Saved
from kvstrata.master.stores.base import Deposed, LeaderRecord
from kvstrata.proto.errors import ConfigError, InvalidArgument, Unavailable
from kvstrata.proto.keys import Namespace

SCHEMA_VERSION: Final = 3
#: A second process that holds the file is waited for this long.
LOCKED_S: Final = 2.0

#: Version 1.
_SCHEMA: Final = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE nodes (
    node_id TEXT PRIMARY KEY, dram_bytes INTEGER NOT NULL, ssd_bytes INTEGER NOT NULL, gone INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE groups (
    name TEXT PRIMARY KEY, block_bytes INTEGER NOT NULL, block_tokens INTEGER NOT NULL,
    hash_bytes INTEGER NOT NULL, shard_count INTEGER NOT NULL, epoch INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE tombstones (
    command INTEGER PRIMARY KEY, name TEXT NOT NULL, shard INTEGER NOT NULL, salt BLOB NOT NULL,
    hashes BLOB NOT NULL, waiting TEXT NOT NULL
);
"""

#: What version 2 added. Salts are BLOBs, as in tombstones; a limit that is NULL is none.
_SCHEMA_2: Final = """
CREATE TABLE policies (
    salt BLOB PRIMARY KEY, dram_limit INTEGER, ssd_limit INTEGER,
    dram_floor INTEGER NOT NULL, ssd_floor INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE fallback (
    one INTEGER PRIMARY KEY CHECK (one = 1), dram_limit INTEGER, ssd_limit INTEGER,
    dram_floor INTEGER NOT NULL, ssd_floor INTEGER NOT NULL, deny INTEGER NOT NULL
);
CREATE TABLE grants (
    node_id TEXT NOT NULL, salt BLOB NOT NULL, dram_limit INTEGER, ssd_limit INTEGER,
    dram_floor INTEGER NOT NULL, ssd_floor INTEGER NOT NULL, PRIMARY KEY (node_id, salt)
) WITHOUT ROWID;
CREATE TABLE scopes (
    command INTEGER PRIMARY KEY, name TEXT NOT NULL, salt BLOB, erase INTEGER NOT NULL, epoch INTEGER,
    waiting TEXT NOT NULL
);
"""

#: What version 3 added.
_SCHEMA_3: Final = """
ALTER TABLE nodes ADD COLUMN draining INTEGER NOT NULL DEFAULT 0;
CREATE TABLE replicas (
    name TEXT NOT NULL, salt BLOB NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (name, salt)
) WITHOUT ROWID;
"""

#: Steps from a schema version to the next one, run in order inside one transaction. A new file takes them all.
_UPGRADES: Final[dict[int, Callable[[sqlite3.Connection], None]]] = {
    1: lambda connection: _run(connection, _SCHEMA_2),
    2: lambda connection: _run(connection, _SCHEMA_3),
}


def _run(connection: sqlite3.Connection, script: str) -> None:
    """One statement at a time: ``executescript`` would commit what was begun."""
    for statement in filter(str.strip, script.split(";")):
        connection.execute(statement)


class SqliteStore:
    """The file at ``path``, or memory for ``None``. Opening raises :class:`ConfigError` saying what to do.

    Thread-safe: one connection behind a lock.
    """

    shared = False

    def __init__(self, path: Path | None, cluster_id: str | None = None) -> None:
        self._where = ":memory:" if path is None else str(path)
        self._lock = threading.Lock()
        self._leader: LeaderRecord | None = None
        try:
            self._connection = sqlite3.connect(
                self._where, timeout=LOCKED_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._open(cluster_id)
            except BaseException:
                self._connection.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(_advice(self._where, error)) from error

    # ------------------------------------------------------------------ opening

    def _open(self, cluster_id: str | None) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL").fetchall()
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("BEGIN IMMEDIATE")
        version = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"{self._where} has schema version {version}, this build knows {SCHEMA_VERSION}: "
                "run the newer kvstrata that wrote it, or give another --state"
            )
        if version == 0:
            self._create()
        for step in range(version or 1, SCHEMA_VERSION):
            _UPGRADES[step](self._connection)
        self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._settle_cluster_id(cluster_id)
        self._connection.execute("COMMIT")

    def _create(self) -> None:
        tables = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        if tables:
            raise ConfigError(f"{self._where} is a database of something else: give another --state")
        _run(self._connection, _SCHEMA)

    def _settle_cluster_id(self, wanted: str | None) -> None:
        row = self._connection.execute("SELECT value FROM facts WHERE name = 'cluster_id'").fetchone()
        if row is None:
            fresh = wanted or secrets.token_hex(8)
            self._connection.execute("INSERT INTO facts VALUES ('cluster_id', ?)", (fresh,))
        elif wanted is not None and row[0] != wanted:
            raise ConfigError(
                f"{self._where} belongs to cluster {row[0]}, not {wanted}: give the cluster's own --state, or a new one"
            )

    # ------------------------------------------------------------------ reading

    def cluster_id(self) -> str:
        with self._lock:
            return str(self._connection.execute("SELECT value FROM facts WHERE name = 'cluster_id'").fetchone()[0])

    def load(self) -> Saved:
        """Everything durable; raises :class:`ConfigError` when a row makes no sense."""
        try:
            with self._lock:
                nodes = self._connection.execute(
                    "SELECT node_id, dram_bytes, ssd_bytes, gone, draining FROM nodes"
                ).fetchall()
                groups = self._connection.execute(_GROUPS).fetchall()
                stones = self._connection.execute(_TOMBSTONES).fetchall()
                policies = self._connection.execute(f"SELECT {_AMOUNTS} FROM policies").fetchall()
                fallback = self._connection.execute("SELECT x'', " + _FALLBACK).fetchone()
                grants = self._connection.execute(f"SELECT {_AMOUNTS}, node_id FROM grants").fetchall()
                scopes = self._connection.execute(_SCOPES).fetchall()
                replicas = self._connection.execute("SELECT name, salt, count FROM replicas").fetchall()
                last, epoch = self._number("last_command"), self._number("leader_epoch")
                revision = self._number("revision")
            saved_groups = tuple(_group(row) for row in groups)
            by_name = {group.namespace.group: group.namespace for group in saved_groups}
            return Saved(
                nodes=tuple(SaveNode(row[0], row[1], row[2], bool(row[3]), bool(row[4])) for row in nodes),
                groups=saved_groups,
                tombstones=tuple(_tombstone(row, by_name) for row in stones),
                last_command=last,
                policies=tuple(TenantPolicy(row[0].decode(), *row[1:]) for row in policies),
                fallback=None if fallback is None else _fallback(fallback),
                grants=_grants(grants),
                scopes=tuple(_scope(row) for row in scopes),
                replicas=tuple(SaveReplicas(n, None if s == _NO_SALT else s.decode(), c) for n, s, c in replicas),
                revision=revision,
                leader_epoch=epoch,
            )
        except (sqlite3.Error, InvalidArgument, LookupError, ValueError) as error:
            raise ConfigError(
                f"{self._where} cannot be read: {error}; restore a copy, or give a new --state"
            ) from error

    def _number(self, name: str) -> int:
        row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def revision(self) -> int:
        with self._lock:
            return self._number("revision")

    # ------------------------------------------------------------------ leading: the file has one master

    def campaign(self, me: LeaderRecord, ttl_ms: int) -> LeaderRecord:
        """Whoever opened the file leads; each start of a master is an epoch of its own."""
        with self._lock:
            if self._leader is None:
                epoch = 1 + max(self._number("leader_epoch"), me.epoch)
                self._in_transaction(lambda: self._connection.execute(_SET_FACT, ("leader_epoch", str(epoch))))
                self._leader = replace(me, epoch=epoch)
            return self._leader

    def resign(self, me: LeaderRecord) -> None:
        with self._lock:
            if self._leader is not None and self._leader.master_id == me.master_id:
                self._leader = None

    def leader(self) -> LeaderRecord | None:
        with self._lock:
            return self._leader

    def announce(self, me: LeaderRecord, ttl_ms: int) -> None:
        """There is nobody to tell."""

    def masters(self) -> list[LeaderRecord]:
        with self._lock:
            return [] if self._leader is None else [self._leader]

    # ------------------------------------------------------------------ writing

    def save(self, writes: Iterable[Save], epoch: int = 0) -> None:
        with self._lock:
            self._in_transaction(lambda: self._write_all(writes, epoch))

    def _write_all(self, writes: Iterable[Save], epoch: int) -> None:
        known = self._number("leader_epoch")
        if 0 < epoch < known:
            raise Deposed(f"state store {self._where} has had a leader of epoch {known}: this one is deposed")
        if epoch > known:
            self._connection.execute(_SET_FACT, ("leader_epoch", str(epoch)))
        for write in writes:
            self._write(write)
        self._connection.execute(_SET_FACT, ("revision", str(self._number("revision") + 1)))

    def _in_transaction(self, change: Callable[[], object]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            change()
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise Unavailable(f"state store {self._where}: {error}") from error
        except BaseException:
            self._roll_back()
            raise

    def _write(self, write: Save) -> None:
        execute = self._connection.execute
        match write:
            case SaveNode(removed=True):
                execute("DELETE FROM nodes WHERE node_id = ?", (write.node_id,))
            case SaveNode():
                row = (write.node_id, write.dram_bytes, write.ssd_bytes, int(write.gone), int(write.draining))
                execute("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?)", row)
            case SaveReplicas(group, salt, 0):
                execute("DELETE FROM replicas WHERE name = ? AND salt = ?", (group, _scope_salt(salt)))
            case SaveReplicas(group, salt, count):
                execute("INSERT OR REPLACE INTO replicas VALUES (?, ?, ?)", (group, _scope_salt(salt), count))
            case SaveGroup():
                ns = write.namespace
                layout = (ns.group, ns.block_bytes, ns.block_tokens, ns.hash_bytes, ns.shard_count, write.epoch)
                execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?)", layout)
            case SaveTombstone():
                self._write_tombstone(write)
            case SavePolicy(salt, None):
                execute("DELETE FROM policies WHERE salt = ?", (_salt_bytes(salt),))
            case SavePolicy(salt, TenantPolicy() as policy):
                execute(
                    "INSERT OR REPLACE INTO policies VALUES (?, ?, ?, ?, ?)", (_salt_bytes(salt), *_amounts(policy))
                )
            case SaveFallback(policy, deny):
                execute("INSERT OR REPLACE INTO fallback VALUES (1, ?, ?, ?, ?, ?)", (*_amounts(policy), int(deny)))
            case SaveGrants(node_id, shares, fallback):
                execute("DELETE FROM grants WHERE node_id = ?", (node_id,))
                rows = [(node_id, _salt_bytes(share.salt), *_amounts(share)) for share in shares]
                if fallback is not None:
                    rows.append((node_id, _NO_SALT, *_amounts(fallback)))
                self._connection.executemany("INSERT INTO grants VALUES (?, ?, ?, ?, ?, ?)", rows)
            case SaveScope():
                self._write_scope(write)

    def _write_scope(self, write: SaveScope) -> None:
        execute = self._connection.execute
        execute(_LAST_COMMAND, (write.command,))
        if not write.waiting:
            execute("DELETE FROM scopes WHERE command = ?", (write.command,))
            return
        salt = None if write.salt is None else _salt_bytes(write.salt)
        scope = (write.command, write.group, salt, int(write.erase), write.epoch, json.dumps(write.waiting))
        execute("INSERT OR REPLACE INTO scopes VALUES (?, ?, ?, ?, ?, ?)", scope)

    def _write_tombstone(self, write: SaveTombstone) -> None:
        execute = self._connection.execute
        execute(_LAST_COMMAND, (write.command,))
        if not write.waiting:
            execute("DELETE FROM tombstones WHERE command = ?", (write.command,))
            return
        waiting, ns = json.dumps(write.waiting), write.namespace
        stone = (write.command, ns.group, ns.shard, _salt_bytes(write.salt), write.hashes, waiting)
        execute("INSERT OR REPLACE INTO tombstones VALUES (?, ?, ?, ?, ?, ?)", stone)

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            try:
                self._connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise Unavailable(f"state store {self._where}: {error} while rolling back") from error

    def close(self) -> None:
        with self._lock:
            self._connection.close()


_GROUPS: Final = "SELECT name, block_bytes, block_tokens, hash_bytes, shard_count, epoch FROM groups"
#: Numbers are given out once, also those of removals that every node confirmed before they were written.
_LAST_COMMAND: Final = """
INSERT INTO facts VALUES ('last_command', CAST(?1 AS TEXT))
ON CONFLICT (name) DO UPDATE SET value = CAST(MAX(CAST(value AS INTEGER), ?1) AS TEXT)
"""
_SET_FACT: Final = "INSERT OR REPLACE INTO facts VALUES (?, ?)"
_TOMBSTONES: Final = "SELECT command, name, shard, salt, hashes, waiting FROM tombstones ORDER BY command"

#: In the place of a salt where the default of unknown salts is meant: no UTF-8 text has this byte.
_NO_SALT: Final = b"\xff"
_AMOUNTS: Final = "salt, dram_limit, ssd_limit, dram_floor, ssd_floor"
_FALLBACK: Final = "dram_limit, ssd_limit, dram_floor, ssd_floor, deny FROM fallback"
_SCOPES: Final = "SELECT command, name, salt, erase, epoch, waiting FROM scopes ORDER BY command"


def _amounts(policy: TenantPolicy | Share) -> tuple[int | None, int | None, int, int]:
    return policy.dram_limit, policy.ssd_limit, policy.dram_floor, policy.ssd_floor


def _fallback(row: tuple[bytes, int | None, int | None, int, int, int]) -> SaveFallback:
    return SaveFallback(TenantPolicy("", *row[1:5]), bool(row[5]))


def _grants(rows: Iterable[tuple[bytes, int | None, int | None, int, int, str]]) -> tuple[SaveGrants, ...]:
    shares: dict[str, list[Share]] = {}
    fallbacks: dict[str, Share] = {}
    for salt, dram_limit, ssd_limit, dram_floor, ssd_floor, node_id in rows:
        of_node = shares.setdefault(node_id, [])
        if salt == _NO_SALT:
            fallbacks[node_id] = Share("", dram_limit, ssd_limit, dram_floor, ssd_floor)
        else:
            of_node.append(Share(salt.decode(), dram_limit, ssd_limit, dram_floor, ssd_floor))
    return tuple(SaveGrants(node_id, tuple(of_node), fallbacks.get(node_id)) for node_id, of_node in shares.items())


def _scope(row: tuple[int, str, bytes | None, int, int | None, str]) -> SaveScope:
    command, group, salt, erase, epoch, waiting = row
    known = None if salt is None else salt.decode()
    return SaveScope(command, group, known, bool(erase), epoch, tuple(json.loads(waiting)))


def _group(row: tuple[str, int, int, int, int, int]) -> SaveGroup:
    name, block_bytes, block_tokens, hash_bytes, shard_count, epoch = row
    return SaveGroup(Namespace(name, block_bytes, block_tokens, hash_bytes, 0, shard_count).validated(), epoch)


def _tombstone(row: tuple[int, str, int, bytes, bytes, str], groups: dict[str, Namespace]) -> SaveTombstone:
    command, name, shard, salt, hashes, waiting = row
    known = groups[name]
    namespace = Namespace(
        name, known.block_bytes, known.block_tokens, known.hash_bytes, shard, known.shard_count
    ).validated()
    return SaveTombstone(command, namespace, salt.decode(), hashes, tuple(json.loads(waiting)))


def _salt_bytes(salt: str) -> bytes:
    """Salts may hold NUL characters, at which SQLite's own text functions stop."""
    return salt.encode()


def _scope_salt(salt: str | None) -> bytes:
    return _NO_SALT if salt is None else _salt_bytes(salt)


def _advice(where: str, error: Exception) -> str:
    text = str(error)
    if "locked" in text:
        return f"state store {where} is in use by another process: stop that master, or give another --state"
    if "not a database" in text or "malformed" in text:
        return f"state store {where} is not one of ours ({text}): give another --state, or restore a copy"
    if "full" in text:
        return f"state store {where}: {text}; free space on that disk, or give another --state"
    if "readonly" in text or "unable to open" in text:
        return f"state store {where}: {text}; its directory must exist and be writable"
    return f"state store {where}: {text}"

"""Durable policy in Redis, where several masters share it, and the lease that says which of them leads.

Plain Redis, over TLS, or found through Sentinels. Whatever changes the store is one Lua script: all of it is done
or nothing, and what a deposed leader sends is refused there.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from kvstrata.master.messages import Save
from kvstrata.master.saved import Saved
from kvstrata.master.stores import redis_scripts as scripts
from kvstrata.master.stores.base import Deposed, LeaderRecord
from kvstrata.master.stores.redis_client import ANSWER_S, RedisClient
from kvstrata.master.stores.redis_rows import FORMAT, ROW_KEYS, command_of, row_of, saved_of
from kvstrata.master.stores.redis_url import RedisAddress
from kvstrata.proto.errors import ConfigError, InvalidArgument, KVError, Unavailable
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: While Redis does not answer, opening waits for it so long, looking this often: both may be starting.
OPEN_S: Final = 10.0
LOOK_S: Final = 0.25
#: What one script saves at most: the rows that may wait in a journal. Redis does nothing else meanwhile.
SCRIPT_ROWS: Final = 20_000
SCRIPT_BYTES: Final = 64 << 20
#: From so many rows on, a save is long.
LONG_ROWS: Final = 500

#: Scripts that change a store of one format into the next one, in order; each looks at the format first, as another
#: master may have done it, and writes the next one at its end. :data:`FORMAT` 1 is the first.
UPGRADES: Final[dict[int, str]] = {}

T = TypeVar("T")


class RedisStore:
    """The rows of one cluster in the Redis at ``address``. Thread-safe.

    Opening raises :class:`ConfigError` saying what to change, or :class:`Unavailable` when nobody has answered for
    ``wait_s``. Every call is bounded: see :class:`RedisClient`.
    """

    shared = True

    def __init__(self, address: RedisAddress, cluster_id: str | None = None, wait_s: float = OPEN_S) -> None:
        self._address = address
        self._where = str(address)
        self._keys = [address.prefix + name for name in scripts.KEYS]
        self._rows = {name: scripts.KEYS.index(name) + 1 for name in ROW_KEYS}
        self._lock = threading.Lock()
        self._seen_revision = 0
        self._me = ""
        self._redis = RedisClient(address)
        self._client, self._call = self._redis.redis, self._redis.call
        self._scripts = {
            text: self._client.register_script(text)
            for text in (
                scripts.OPEN, scripts.LOAD, scripts.SAVE, scripts.CAMPAIGN, scripts.RESIGN, scripts.ANNOUNCE,
                scripts.MASTERS, *UPGRADES.values(),
            )
        }  # fmt: skip
        try:
            self._cluster_id = self._open(cluster_id, time.monotonic() + wait_s)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ opening

    def _open(self, wanted: str | None, deadline: float) -> str:
        fresh = wanted or secrets.token_hex(8)
        try:
            answer = self._answer_by(deadline, lambda: self._run(scripts.OPEN, fresh, FORMAT))
            held, stored = str(answer[1], "utf-8"), int(answer[2])
            if wanted is not None and held != wanted:
                raise ConfigError(
                    f"{self._where} belongs to cluster {held}, not {wanted}: give the cluster's own --state, or "
                    "another ?cluster=NAME in it"
                )
            for step in range(stored, FORMAT):
                self._run(UPGRADES[step], held, step)
        except _Newer as error:
            raise ConfigError(str(error)) from error
        self._warn()
        return held

    def _answer_by(self, deadline: float, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except _Newer:
                raise
            except Unavailable as error:
                if time.monotonic() + LOOK_S > deadline:
                    raise
                log.warning("waiting for the state store", store=self._where, error=str(error))
            time.sleep(LOOK_S)

    def _warn(self) -> None:
        """Settings with which Redis forgets. Where they may not be asked for, nothing is said."""
        try:
            info = self._call(lambda: self._client.info())
        except KVError as error:
            log.debug("the state store's settings are not known", error=str(error))
            return
        if not info.get("aof_enabled"):
            log.warning(
                "the state store keeps no log of writes: a restart of it may lose the last minutes",
                store=self._where, advice="set appendonly yes",
            )  # fmt: skip
        if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
            log.warning(
                "the state store may evict policy when it is full",
                store=self._where, advice="set maxmemory-policy noeviction",
            )  # fmt: skip

    # ------------------------------------------------------------------ reading

    def cluster_id(self) -> str:
        """Whose rows these are; known since the store was opened."""
        return self._cluster_id

    def load(self) -> Saved:
        """Everything durable, of one moment. Raises :class:`ConfigError` when a row makes no sense."""
        facts, *hashes = (dict(zip(*[iter(flat)] * 2, strict=True)) for flat in self._read()[1:])
        self._check(facts)
        try:
            saved = saved_of(facts, hashes)
        except (InvalidArgument, LookupError, ValueError) as error:
            raise ConfigError(
                f"{self._where} cannot be read: {error}; restore a copy of that Redis, or give a new --state"
            ) from error
        self._saw(saved.revision)
        return saved

    def _read(self) -> list[Any]:
        return self._checked(self._call(lambda: self._scripts[scripts.LOAD](self._keys, client=self._redis.patient)))

    def _check(self, facts: Mapping[bytes, bytes]) -> None:
        """An emptied store is nobody's, and read as empty."""
        if int(facts.get(b"format", 0)) > FORMAT:
            raise self._refusal(f"format {int(facts[b'format'])}")
        held = facts.get(b"cluster_id", self._cluster_id.encode()).decode()
        if held != self._cluster_id and int(facts.get(b"revision", 0)) > 0:
            raise self._refusal(f"cluster {held}")

    def revision(self) -> int:
        """Grows with each save; 0 once the store has been emptied."""
        names = ("format", "cluster_id", "revision")
        values = self._call(lambda: self._client.hmget(self._keys[0], names))
        facts = {name.encode(): value for name, value in zip(names, values, strict=True) if value is not None}
        self._check(facts)
        revision = int(facts.get(b"revision", 0))
        self._saw(revision)
        return revision

    def _saw(self, revision: int) -> None:
        with self._lock:
            self._seen_revision = max(self._seen_revision, revision)

    # ------------------------------------------------------------------ writing

    def save(self, writes: Iterable[Save], epoch: int = 0) -> None:
        """One script: all or nothing. What is more than ``SCRIPT_ROWS`` or ``SCRIPT_BYTES`` goes in several, in order.

        After :class:`Unavailable` rows may be in nevertheless: the answer was lost. Saving them again is right.
        """
        for command, rows in _pieces(writes):
            numbered = [item for name, field, value in rows for item in (self._rows[name], field, value)]
            arguments = (*self._ours(self._me), epoch, command, *numbered)
            client = self._client if len(rows) < LONG_ROWS else self._redis.patient
            answer, copies = self._call(partial(self._save, client, arguments))
            self._checked(answer)
            self._saw(1)
            if copies < self._address.replicas:
                raise Unavailable(
                    f"state store {self._where}: {copies} replicas have the write, {self._address.replicas} must: look "
                    "at them, or change replicas= in --state"
                )

    def _save(self, client: Any, arguments: tuple[object, ...]) -> tuple[list[Any], int]:
        """What the script answered, and how many replicas have what it did: asked on the same connection."""
        script, wanted = self._scripts[scripts.SAVE], self._address.replicas
        if not wanted:
            return script(self._keys, arguments, client=client), 0
        with client.pipeline(transaction=False) as pipe:
            script(self._keys, arguments, client=pipe)
            pipe.wait(wanted, int(ANSWER_S * 500))
            answers = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers[0], answers[1]

    # ------------------------------------------------------------------ leading

    def campaign(self, me: LeaderRecord, ttl_ms: int) -> LeaderRecord:
        self._me = me.master_id
        answer = self._mine(scripts.CAMPAIGN, me.master_id, ttl_ms, me.epoch, me.channel, me.grpc, me.http)
        return _record(answer[1:])

    def resign(self, me: LeaderRecord) -> None:
        self._mine(scripts.RESIGN, me.master_id)

    def leader(self) -> LeaderRecord | None:
        names = ("master_id", "epoch", "channel", "grpc", "http")
        values = self._call(lambda: self._client.hmget(self._keys[1], names))
        return None if values[0] is None else _record(values)

    def masters(self) -> list[LeaderRecord]:
        items = self._run(scripts.MASTERS)[1:]
        return sorted((_record(items[at : at + 5]) for at in range(0, len(items), 5)), key=lambda one: one.master_id)

    def announce(self, me: LeaderRecord, ttl_ms: int) -> None:
        self._mine(scripts.ANNOUNCE, me.master_id, ttl_ms, me.channel, me.grpc, me.http)

    def close(self) -> None:
        self._redis.close()

    # ------------------------------------------------------------------ calls

    def _mine(self, script: str, me: str, *arguments: object) -> list[Any]:
        """Run a script that first looks whether the store is ours."""
        return self._run(script, *self._ours(me), *arguments)

    def _ours(self, me: str) -> tuple[object, ...]:
        with self._lock:
            return self._cluster_id, FORMAT, self._seen_revision, me

    def _run(self, script: str, *arguments: object) -> list[Any]:
        return self._checked(self._call(lambda: self._scripts[script](self._keys, arguments)))

    def _checked(self, answer: list[Any]) -> list[Any]:
        status = answer[0].decode()
        if status != "ok":
            raise self._refusal(status)
        return answer

    def _refusal(self, status: str) -> KVError:
        word, _, what = status.partition(" ")
        if word == "format":
            return _Newer(
                f"{self._where} has format {what}, this build knows {FORMAT}: run the newer kvstrata that wrote it, or "
                "give another --state"
            )
        if word == "cluster":
            return Unavailable(
                f"state store {self._where} belongs to cluster {what} now, not {self._cluster_id}: it was emptied and "
                "taken, or another pool uses it; start the masters again, or give each pool its ?cluster=NAME"
            )
        return Deposed(f"state store {self._where} has had a leader of epoch {what}: this one is deposed")


class _Newer(Unavailable):
    """A newer build has changed the store's format."""


def _pieces(writes: Iterable[Save]) -> Iterator[tuple[str, list[tuple[str, bytes, bytes]]]]:
    """What one script takes each: the greatest number of a command, or '', and rows. At least one."""
    command, rows, nbytes, first = 0, list[tuple[str, bytes, bytes]](), 0, True
    for write in writes:
        row = row_of(write)
        size = len(row[1]) + len(row[2])
        if rows and (len(rows) == SCRIPT_ROWS or nbytes + size > SCRIPT_BYTES):
            yield str(command or ""), rows
            command, rows, nbytes, first = 0, [], 0, False
        command = max(command, command_of(write))
        rows.append(row)
        nbytes += size
    if rows or first:
        yield str(command or ""), rows


def _record(items: Iterable[bytes | None]) -> LeaderRecord:
    master_id, epoch, channel, grpc, http = ((item or b"").decode() for item in items)
    return LeaderRecord(master_id, int(epoch or 0), channel, grpc, http)

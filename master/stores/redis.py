"""Durable policy in Redis, where several masters share it, and the lease that says which of them leads.

Plain Redis, over TLS, or found through Sentinels. Whatever changes the store is one Lua script: all of it is done
or nothing, and what a deposed leader sends is refused there.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from kvstrata.master.messages import Save
from kvstrata.master.state import Saved
from kvstrata.master.stores import redis_scripts as scripts
from kvstrata.master.stores.base import Deposed, LeaderRecord
from kvstrata.master.stores.redis_rows import FORMAT, ROW_KEYS, last_command_of, row_of, saved_of
from kvstrata.master.stores.redis_url import RedisAddress
from kvstrata.proto.errors import ConfigError, InvalidArgument, KVError, Unavailable
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: A connection must be there within this, and each answer.
CONNECT_S: Final = 1.0
ANSWER_S: Final = 1.0
#: One Sentinel is asked for this long before the next one is.
SENTINEL_S: Final = 0.3
#: A call whose connection broke is made again once, if it broke this soon: Redis has been restarted since the last.
AGAIN_S: Final = 0.5
#: Rows and bytes of one save: about a hundredth of a second of Redis's time for each 10,000 rows.
ROWS_MAX: Final = 100_000
BYTES_MAX: Final = 256 << 20

#: Scripts that change a store of one format into the next one. :data:`FORMAT` 1 is the first.
UPGRADES: Final[dict[int, str]] = {}

T = TypeVar("T")


class RedisStore:
    """The rows of one cluster in the Redis at ``address``. Thread-safe.

    Opening raises :class:`ConfigError` saying what to change, or :class:`Unavailable` when nobody answers. Every
    call ends within about ``CONNECT_S + ANSWER_S``, and ``SENTINEL_S`` more for each Sentinel that is asked.
    """

    shared = True

    def __init__(self, address: RedisAddress, cluster_id: str | None = None) -> None:
        self._address = address
        self._where = str(address)
        self._keys = [address.prefix + name for name in scripts.KEYS]
        self._rows = {name: scripts.KEYS.index(name) + 1 for name in ROW_KEYS}
        self._lock = threading.Lock()
        self._seen_revision = 0
        self._me = ""
        self._library = _library()
        self._client, self._sentinel = _connected(self._library, address)
        self._scripts = {
            text: self._client.register_script(text)
            for text in (
                scripts.OPEN, scripts.SAVE, scripts.CAMPAIGN, scripts.RESIGN, scripts.ANNOUNCE, scripts.MASTERS,
                *UPGRADES.values(),
            )
        }  # fmt: skip
        try:
            self._cluster_id = self._open(cluster_id)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ opening

    def _open(self, wanted: str | None) -> str:
        fresh = wanted or secrets.token_hex(8)
        try:
            answer = self._run(scripts.OPEN, fresh, FORMAT)
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

        def call() -> list[Any]:
            with self._client.pipeline(transaction=True) as pipe:
                for name in ("facts", *ROW_KEYS):
                    pipe.hgetall(self._address.prefix + name)
                return list(pipe.execute())

        facts, *hashes = self._call(call)
        self._check(facts)
        try:
            saved = saved_of(facts, hashes)
        except (InvalidArgument, LookupError, ValueError) as error:
            raise ConfigError(
                f"{self._where} cannot be read: {error}; restore a copy of that Redis, or give a new --state"
            ) from error
        self._saw(saved.revision)
        return saved

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
        """One script: all or nothing, whatever their number, up to ``ROWS_MAX`` rows and ``BYTES_MAX``.

        After :class:`Unavailable` the rows may be in nevertheless: the answer was lost. Saving them again is right.
        """
        batch = list(writes)
        command = last_command_of(batch)
        arguments: list[object] = [epoch, "" if command is None else command]
        nbytes = 0
        for write in batch:
            name, field, value = row_of(write)
            arguments += (self._rows[name], field, value)
            nbytes += len(field) + len(value)
        if len(batch) > ROWS_MAX or nbytes > BYTES_MAX:
            raise InvalidArgument(
                f"{len(batch)} rows of {nbytes} bytes are too much to save at once: at most {ROWS_MAX} rows and "
                f"{BYTES_MAX} bytes"
            )
        self._mine(scripts.SAVE, self._me, *arguments)
        with self._lock:
            self._seen_revision = max(self._seen_revision, 1)
        if self._address.replicas:
            self._wait_for_replicas()

    def _wait_for_replicas(self) -> None:
        wanted = self._address.replicas
        got = self._call(lambda: self._client.wait(wanted, int(ANSWER_S * 500)))
        if got < wanted:
            raise Unavailable(
                f"state store {self._where}: {got} replicas have the write, {wanted} must: look at them, or change "
                "replicas= in --state"
            )

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
        """Ends its connections; those in use end with their calls."""
        for part in (self._client, *(self._sentinel.sentinels if self._sentinel else ())):
            part.close()
            part.connection_pool.disconnect()

    # ------------------------------------------------------------------ calls

    def _mine(self, script: str, me: str, *arguments: object) -> list[Any]:
        """Run a script that first looks whether the store is ours."""
        with self._lock:
            seen = self._seen_revision
        return self._run(script, self._cluster_id, FORMAT, seen, me, *arguments)

    def _run(self, script: str, *arguments: object) -> list[Any]:
        answer: list[Any] = self._call(lambda: self._scripts[script](self._keys, arguments))
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

    def _call(self, call: Callable[[], T]) -> T:
        """One exchange, and one more when the connection turned out to be dead at once."""
        started = time.monotonic()
        try:
            return call()
        except self._library.exceptions.ConnectionError as error:
            again = time.monotonic() - started < AGAIN_S and not self._hopeless(error)
            if not again:
                raise self._error(error) from error
        except (self._library.exceptions.RedisError, OSError) as error:
            raise self._error(error) from error
        try:
            return call()
        except (self._library.exceptions.RedisError, OSError) as error:
            raise self._error(error) from error

    def _hopeless(self, error: Exception) -> bool:
        known = self._library.exceptions
        return isinstance(error, (known.AuthenticationError, known.BusyLoadingError, known.AuthorizationError))

    def _error(self, error: Exception) -> KVError:
        known = self._library.exceptions
        text = str(error) or type(error).__name__
        if isinstance(error, known.ReadOnlyError):  # whoever writes is elsewhere by now: look again
            self._client.connection_pool.disconnect(inuse_connections=False)
        if isinstance(error, self._library.sentinel.MasterNotFoundError):
            text = f"no Sentinel that answers knows a living {self._address.service}: start it, or correct --state"
        for secret in self._address.secrets():
            text = text.replace(secret, "***")
        opening = not hasattr(self, "_cluster_id")
        refused = (known.AuthenticationError, known.NoPermissionError, known.AuthorizationError)
        if opening and (isinstance(error, refused) or "NOAUTH" in text or "WRONGPASS" in text):
            return ConfigError(f"state store {self._where}: {text}; correct the user and the password of --state")
        if opening and ("WRONGTYPE" in text or "certificate" in text.lower() or "DB index" in text):
            return ConfigError(f"state store {self._where}: {text}; correct --state")
        return Unavailable(f"state store {self._where}: {text}")


class _Newer(Unavailable):
    """A newer build has changed the store's format."""


def _library() -> Any:
    """redis-py, which is an extra."""
    try:
        import redis
        import redis.sentinel
    except ImportError as error:
        raise ConfigError(
            "--state names a Redis, and the redis package is not installed: pip install 'kvstrata[redis]'"
        ) from error
    return redis


def _connected(library: Any, address: RedisAddress) -> tuple[Any, Any]:
    """A client, which connects when it is first used, and its Sentinels. Retries are ours: see ``_call``."""
    tls: dict[str, Any] = {}
    if address.tls:
        tls = {
            "ssl": True,
            "ssl_ca_certs": address.ca,
            "ssl_certfile": address.cert,
            "ssl_keyfile": address.key,
            "ssl_check_hostname": address.check_hostname,
        }
    common = {"protocol": 2, "retry": library.retry.Retry(library.backoff.NoBackoff(), 0), **tls}
    limits = {"socket_connect_timeout": CONNECT_S, "socket_timeout": ANSWER_S}
    login = {"db": address.db, "username": address.username, "password": address.password}
    if address.service is None:
        host, port = address.hosts[0]
        return library.Redis(host=host, port=port, **login, **limits, **common), None
    sentinel_login = {"username": address.sentinel_username, "password": address.sentinel_password}
    short = {"socket_connect_timeout": SENTINEL_S, "socket_timeout": SENTINEL_S}
    sentinel = library.sentinel.Sentinel(list(address.hosts), sentinel_kwargs={**sentinel_login, **short, **common})
    return sentinel.master_for(address.service, **login, **limits, **common), sentinel


def _record(items: Iterable[bytes | None]) -> LeaderRecord:
    master_id, epoch, channel, grpc, http = ((item or b"").decode() for item in items)
    return LeaderRecord(master_id, int(epoch or 0), channel, grpc, http)

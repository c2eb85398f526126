"""A Redis and how it is called: found directly or through Sentinels, every call bounded, errors as ours.

Errors show no password.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvstrata.master.stores.redis_url import RedisAddress
from kvstrata.proto.errors import ConfigError, KVError, Unavailable
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: A connection must be there within this, and each answer.
CONNECT_S: Final = 1.0
ANSWER_S: Final = 1.0
#: An answer to what is long may take this: everything read, or a journal's worth written.
LONG_S: Final = 5.0
#: One Sentinel is asked for this long before the next one is.
SENTINEL_S: Final = 0.3
#: A call whose connection broke is made again once, if it broke this soon: Redis has been restarted since the last.
AGAIN_S: Final = 0.5

T = TypeVar("T")


class RedisClient:
    """Connects when it is first used. Thread-safe.

    ``redis`` is for what is short, ``patient`` for what is long. A call ends within about ``CONNECT_S`` and
    ``ANSWER_S`` (``LONG_S``), and ``SENTINEL_S`` more for each Sentinel that is asked. It
    raises :class:`Unavailable`, and until the first answer has come :class:`ConfigError` for what a wrong ``--state``
    brings about.
    """

    def __init__(self, address: RedisAddress) -> None:
        self.where = str(address)
        self._address = address
        self._library = _library()
        self._answered = False
        self._sentinel = _sentinel(self._library, address) if address.service else None
        self.redis = _connected(self._library, address, self._sentinel, ANSWER_S)
        self.patient = _connected(self._library, address, self._sentinel, LONG_S)

    def call(self, call: Callable[[], T]) -> T:
        """One exchange, and one more when the connection turned out to be dead at once."""
        started = time.monotonic()
        try:
            answer = call()
        except (self._library.exceptions.RedisError, OSError) as error:
            if time.monotonic() - started > AGAIN_S or not self._worth_another(error):
                raise self._error(error) from error
            try:
                answer = call()
            except (self._library.exceptions.RedisError, OSError) as second:
                raise self._error(second) from second
        self._answered = True
        return answer

    def close(self) -> None:
        """Ends its connections; those in use end with their calls."""
        for part in (self.redis, self.patient, *(self._sentinel.sentinels if self._sentinel else ())):
            part.close()
            part.connection_pool.disconnect()

    def _worth_another(self, error: Exception) -> bool:
        known = self._library.exceptions
        hopeless = (known.AuthenticationError, known.AuthorizationError, known.BusyLoadingError)
        return isinstance(error, known.ConnectionError) and not isinstance(error, hopeless)

    def _error(self, error: Exception) -> KVError:
        known = self._library.exceptions
        text = str(error).partition(" script: ")[0] or type(error).__name__
        if isinstance(error, (known.ReadOnlyError, known.ConnectionError, known.TimeoutError, OSError)):
            # Whoever takes writes may be elsewhere by now: no other connection is worth keeping.
            for part in (self.redis, self.patient):
                part.connection_pool.disconnect(inuse_connections=False)
        if isinstance(error, self._library.sentinel.MasterNotFoundError):
            text = (
                f"no Sentinel that answers knows a living {self._address.service}: look at the Sentinels, or correct "
                "--state: hosts, service, logins, certificates"
            )
        for secret in self._address.secrets():
            text = text.replace(secret, "***")
        refused = isinstance(error, (known.AuthenticationError, known.AuthorizationError, known.NoPermissionError))
        if not self._answered and (refused or any(sign in text for sign in _LOGIN)):
            return ConfigError(f"state store {self.where}: {text}; correct the user and the password of --state")
        if not self._answered and any(sign in text for sign in _WRONG):
            return ConfigError(f"state store {self.where}: {text}; correct --state")
        return Unavailable(f"state store {self.where}: {text}")


#: In the text of what a login would mend. Without one, a long command is refused for its length.
_LOGIN: Final = ("NOAUTH", "Authentication required", "unauthenticated", "WRONGPASS")
#: In the text of what waiting will not mend.
_WRONG: Final = ("WRONGTYPE", "CERTIFICATE_VERIFY_FAILED", "KEY_VALUES_MISMATCH", "DB index is out of range", "MOVED")


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


def _connected(library: Any, address: RedisAddress, sentinel: Any, answer_s: float) -> Any:
    """A client, which asks the Sentinels where to connect if there are any."""
    settings = {
        **_common(library, address),
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": answer_s,
    }
    if sentinel is not None:
        return sentinel.master_for(address.service, **settings)
    host, port = address.hosts[0]
    return library.Redis(host=host, port=port, **settings)


def _sentinel(library: Any, address: RedisAddress) -> Any:
    settings = {
        **_common(library, address),
        "username": address.sentinel_username,
        "password": address.sentinel_password,
        "socket_connect_timeout": SENTINEL_S,
        "socket_timeout": SENTINEL_S,
    }
    return library.sentinel.Sentinel(list(address.hosts), sentinel_kwargs=settings)


def _common(library: Any, address: RedisAddress) -> dict[str, Any]:
    """Retries are ours: see :meth:`RedisClient.call`."""
    common = {"protocol": 2, "retry": library.retry.Retry(library.backoff.NoBackoff(), 0)}
    if not address.tls:
        return common
    return common | {
        "ssl": True,
        "ssl_ca_certs": address.ca,
        "ssl_certfile": address.cert,
        "ssl_keyfile": address.key,
        "ssl_check_hostname": address.check_hostname,
    }

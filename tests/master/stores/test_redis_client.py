"""One call to Redis: what is tried again, what becomes of an error. Nothing is connected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvstrata.master.stores.redis_client import AGAIN_S, RedisClient
from kvstrata.master.stores.redis_url import parse_redis_url
from kvstrata.proto.errors import ConfigError, KVError, Unavailable

redis = pytest.importorskip("redis", reason="pip install 'kvstrata[redis]'")


@pytest.fixture
def client() -> Iterator[RedisClient]:
    made = RedisClient(parse_redis_url("redis+sentinel://me:hunter2@127.0.0.1:1/kv?sentinel_password=watchword"))
    yield made
    made.close()


class Failing:
    """Raises the errors, one a call, then answers with the number of calls; each takes ``seconds``."""

    def __init__(self, *errors: Exception, seconds: float = 0.0) -> None:
        self.errors = list(errors)
        self.calls = 0
        self._seconds = seconds

    def __call__(self) -> int:
        self.calls += 1
        time.sleep(self._seconds)
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


def broken() -> Exception:
    return redis.exceptions.ConnectionError("Connection closed by server.")


def test_a_connection_that_was_dead_is_tried_once_more(client: RedisClient) -> None:
    assert client.call(Failing(broken())) == 2
    twice = Failing(broken(), broken())
    with pytest.raises(Unavailable, match="closed by server"):
        client.call(twice)
    assert twice.calls == 2


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.TimeoutError("Timeout reading from socket"),
        redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
        redis.exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
        OSError("no route to host"),
    ],
)
def test_what_another_try_would_not_mend_is_told_at_once(client: RedisClient, error: Exception) -> None:
    call = Failing(error)
    with pytest.raises(Unavailable, match=r"state store redis\+sentinel://me:\*\*\*@127.0.0.1:1/kv/0: "):
        client.call(call)
    assert call.calls == 1


def test_what_took_long_is_not_tried_again(client: RedisClient) -> None:
    slow = Failing(broken(), seconds=AGAIN_S + 0.05)
    with pytest.raises(Unavailable):
        client.call(slow)
    assert slow.calls == 1


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.AuthenticationError("invalid username-password pair"),
        redis.exceptions.NoPermissionError("this user has no permissions to run the 'evalsha' command"),
        redis.exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        redis.exceptions.ConnectionError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"),
    ],
)
def test_before_the_first_answer_a_wrong_setting_is_named_as_one(client: RedisClient, error: Exception) -> None:
    def raised() -> type[KVError]:
        with pytest.raises(KVError) as caught:
            client.call(Failing(error, error))
        return caught.type

    assert raised() is ConfigError
    client.call(Failing())
    assert raised() is Unavailable, "it has worked: somebody is at work on that Redis"


@pytest.mark.parametrize("make", [redis.exceptions.ResponseError, redis.exceptions.ConnectionError, OSError])
def test_an_error_shows_no_password(client: RedisClient, make: Callable[[str], Exception]) -> None:
    error = make("cannot AUTH me hunter2, nor watchword script: 00ff, on @user_script:1.")
    with pytest.raises(KVError) as caught:
        client.call(Failing(error, error))
    assert str(caught.value).endswith("/kv/0: cannot AUTH me ***, nor ***")

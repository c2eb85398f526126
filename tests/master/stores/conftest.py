"""Stores to test: SQLite in memory and in a file, and a Redis that all tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from kvstrata.master.stores.base import StateStore
from kvstrata.master.stores.opening import open_store
from tests.redis_server import RedisServer, free_port, needs_redis, redis_server, until

__all__ = ["redis_server"]

#: Opens the same store once more each time, as another process would.
Opener = Callable[[], StateStore]

_NAMES = count()


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis; each test takes names of its own there."""
    needs_redis()
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis Cluster of one: it refuses a script or a transaction whose keys are not all in one slot."""
    needs_redis()
    options = ("cluster-enabled yes", f"cluster-port {free_port()}")
    with RedisServer(tmp_path_factory.mktemp("cluster"), *options) as server:
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            until(lambda: client.set("probe", 1))
        yield server


@pytest.fixture(params=["sqlite", "redis", "redis cluster"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens one store again and again; all are closed at the end."""
    if request.param == "sqlite":
        spec = str(tmp_path / "state.db")
    else:
        server = request.getfixturevalue("shared_redis" if request.param == "redis" else "cluster_redis")
        spec = f"{server.url}?cluster=test-{next(_NAMES)}"
    opened: list[StateStore] = []

    def once_more() -> StateStore:
        opened.append(open_store(spec))
        return opened[-1]

    yield once_more
    for store in opened:
        store.close()

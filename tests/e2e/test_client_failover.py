"""Three masters on a Redis, and a client that stores, removes and asks while the leader dies or stands still."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client
from tests.e2e.many_masters import SIZE, ManyMasters
from tests.e2e.real_pool import keys, payload
from tests.redis_server import needs_redis
from tests.waiting import until

TAKEOVER_S = 5.0
#: A stopped master costs 250 ms; the rest is for a shared machine.
BOUND_S = 1.5


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ManyMasters]:
    needs_redis()
    pool = ManyMasters(tmp_path)
    yield pool
    pool.close()


class Worker:
    """Calls that need a master, one after the other: what each took, and which changes were not made."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.ns = client.namespace("failover", block_bytes=SIZE, block_tokens=16)
        self.into = np.zeros((1, SIZE), np.uint8)
        self.target = client.register(self.into).rows(self.ns)
        self.number = 0
        self.longest_s = 0.0

    def turn(self) -> bool:
        """Look up, store, look up, load and remove one block; False when no master took a change."""
        self.number += 1
        name = keys(1, f"failover/{self.number}")
        data = payload(name, "", SIZE)
        began = time.monotonic()
        found = self.client.lookup(self.ns, "", name)
        assert found.answered, f"a lookup needs no leader: {found.reasons}"
        stored = self.client.store(self.ns, "", name, self.client.register(data).rows(self.ns))
        loaded = self.client.load(self.ns, "", name, self.target).loaded.all()
        assert not stored.stored.all() or loaded, "what was stored is there"
        assert not loaded or (self.into == data).all(), "wrong bytes"
        removed = self.client.remove(self.ns, "", name)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        return bool(stored.stored.all()) and removed.answered


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_changes_go_on_with_the_next_leader_and_questions_never_stop(pool: ManyMasters, how: int) -> None:
    old = pool.leader()
    with Client(pool.masters, verify="always") as client:
        worker = Worker(client)
        until(worker.turn)
        worker.longest_s = 0.0
        pool.daemons[old].signal(how)
        gone = time.monotonic()
        until(worker.turn, TAKEOVER_S)
        assert time.monotonic() - gone < TAKEOVER_S
        assert worker.longest_s < BOUND_S, "no call waits for the one that is gone"
        for _ in range(20):
            assert worker.turn()
        shown = {str(master["address"]): master for master in client.health()["masters"]}  # type: ignore[attr-defined]
        (leads,) = (address for address, master in shown.items() if master["leads"])
        assert leads != pool.channels[old] and not shown[pool.channels[old]]["reachable"]
        if how == signal.SIGSTOP:
            pool.daemons[old].signal(signal.SIGCONT)
        else:
            pool.start_master(old)
        until(lambda: bool(client.health()["healthy"]), TAKEOVER_S)
        until(lambda: pool.health(old)["leader"] == leads, TAKEOVER_S)
        for _ in range(20):
            assert worker.turn(), "one that is back does not draw changes to itself"

"""Three masters on a Redis: the leader killed, stopped, cut off; Redis killed, restarted, emptied. Reads go on."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.client.admin import AdminClient
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import KVError, Retryable
from tests import command_line
from tests.e2e.many_masters import COUNT, ManyMasters, Reader
from tests.redis_server import needs_redis
from tests.waiting import until

#: A takeover, with the lease's time to live in it.
TAKEOVER_S = 5.0
#: A client that asks a master which is stopped or gone turns to another one.
CALL_S = 2.0
LIMIT = 64 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ManyMasters]:
    needs_redis()
    pool = ManyMasters(tmp_path)
    yield pool
    pool.close()


@pytest.fixture
def reader(pool: ManyMasters) -> Iterator[Reader]:
    reader = Reader(pool.masters).start()
    yield reader
    reader.close()


def set_limit(pool: ManyMasters, salt: str, nbytes: int = LIMIT) -> None:
    """Within the time that a takeover has."""

    def done() -> bool:
        try:
            with AdminClient(pool.masters) as admin:
                admin.set_tenant(control.TenantPolicy(salt=salt, dram_limit=nbytes))
        except Retryable:
            return False
        return True

    until(done, TAKEOVER_S)


def limits(pool: ManyMasters) -> dict[str, int]:
    """DRAM limits by tenant, as the leader has them."""
    with AdminClient(pool.masters) as admin:
        return {row.policy.salt: row.policy.dram_limit for row in admin.list_tenants().tenants if row.defined}


def obeyed(pool: ManyMasters) -> set[int]:
    """Epochs of the leaders that nodes obey."""
    return {pool.health(name)["leader_epoch"] for name in pool.daemons if name.startswith("node")}


def calm(pool: ManyMasters, reader: Reader, leader: str) -> None:
    """One leads, every node obeys it, and no read has failed."""
    epoch = pool.health(leader)["epoch"]
    until(lambda: obeyed(pool) == {epoch})
    reader.more()
    assert not reader.wrong, reader.wrong
    assert reader.missed <= max(3, reader.rounds // 20)
    assert reader.longest_s < CALL_S


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_another_master_leads_when_the_leader_is_gone(pool: ManyMasters, reader: Reader, how: int) -> None:
    set_limit(pool, "before")
    old = pool.leader()
    epoch = pool.health(old)["epoch"]
    # One that has just come back may not have said so yet.
    until(lambda: {row["channel"] for row in _listed(pool)["masters"]} == set(pool.channels.values()), TAKEOVER_S)
    assert [row["channel"] for row in _listed(pool)["masters"] if row["leading"]] == [pool.channels[old]]
    pool.daemons[old].signal(how)
    new = pool.leader(besides=old, seconds=TAKEOVER_S) if how == signal.SIGKILL else _leader_of_two(pool, old)
    assert pool.health(new)["epoch"] > epoch
    set_limit(pool, "after")
    assert limits(pool) == {"before": LIMIT, "after": LIMIT}
    calm(pool, reader, new)
    if how == signal.SIGSTOP:
        pool.daemons[old].signal(signal.SIGCONT)
        until(lambda: pool.leaders() == [new], TAKEOVER_S)
    else:
        pool.start_master(old)
    until(lambda: pool.nodes_of(old) == 2)
    assert pool.health(old)["leader"] == pool.channels[new]
    calm(pool, reader, new)
    assert limits(pool) == {"before": LIMIT, "after": LIMIT}


def _listed(pool: ManyMasters) -> dict[str, Any]:
    """What ``kvstrata masters`` says."""
    done = command_line.run("masters", "--master", pool.masters, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def _leader_of_two(pool: ManyMasters, stopped: str) -> str:
    """As ``leader``, without asking one that answers nothing."""
    others = [name for name in pool.names if name != stopped]
    found: list[str] = []

    def led() -> bool:
        found[:] = [name for name in others if pool.health(name)["leading"]]
        return len(found) == 1

    until(led, TAKEOVER_S)
    return found[0]


def test_a_leader_that_is_cut_off_from_the_store_is_deposed_by_what_nodes_say(
    pool: ManyMasters, reader: Reader
) -> None:
    set_limit(pool, "before")
    old = pool.leader()
    pool.ways[old].hold()
    new = _leader_of_two(pool, old)
    until(lambda: not pool.health(old)["leading"], TAKEOVER_S)
    set_limit(pool, "after")
    calm(pool, reader, new)
    with AdminClient(pool.channels[old]) as admin:
        assert admin.masters().problem, "it cannot reach the store, and says so"
    pool.ways[old].go_on()
    until(lambda: pool.health(old)["leader"] == pool.channels[new])
    assert limits(pool) == {"before": LIMIT, "after": LIMIT}


def test_a_leader_that_stops_in_order_hands_over_at_once(pool: ManyMasters, reader: Reader) -> None:
    set_limit(pool, "before")
    old = pool.leader()
    began = time.monotonic()
    pool.daemons[old].signal(signal.SIGTERM)
    new = pool.leader(besides=old)
    assert time.monotonic() - began < TAKEOVER_S
    calm(pool, reader, new)
    assert limits(pool) == {"before": LIMIT}


@pytest.mark.parametrize("loses", [False, True])
def test_redis_dies_and_comes_back(pool: ManyMasters, reader: Reader, loses: bool) -> None:
    set_limit(pool, "before")
    leader = pool.leader()
    pool.redis.kill()
    until(lambda: any("state store" in problem for problem in pool.health(leader)["problems"]))
    with AdminClient(pool.masters) as admin, pytest.raises(KVError, match="could not be kept"):
        admin.set_tenant(control.TenantPolicy(salt="meanwhile", dram_limit=LIMIT))
    assert pool.leaders() == [leader], "it goes on"
    reader.more(30)
    if loses:
        for part in (pool.redis.base / "appendonlydir").iterdir():
            part.unlink()
    pool.redis.start()
    until(lambda: not pool.health(leader)["problems"])
    set_limit(pool, "after")
    calm(pool, reader, pool.leader())
    _policies_outlive_every_master(pool)


def test_redis_emptied_is_filled_again(pool: ManyMasters, reader: Reader) -> None:
    set_limit(pool, "before")
    leader = pool.leader()
    pool.redis.empty()
    with pool.redis.client() as redis:
        until(lambda: any(b"policies" in key for key in redis.keys("*")), TAKEOVER_S)
    assert pool.leader() == leader, "who led goes on, in an epoch of its own"
    set_limit(pool, "after")
    calm(pool, reader, leader)
    _policies_outlive_every_master(pool)


def test_redis_emptied_and_the_leader_gone(pool: ManyMasters, reader: Reader) -> None:
    set_limit(pool, "before")
    old = pool.leader()
    until(lambda: not pool.health(old)["problems"])
    _everybody_has_read(pool)
    pool.daemons[old].signal(signal.SIGKILL)
    pool.redis.empty()
    new = pool.leader(besides=old, seconds=2 * TAKEOVER_S)
    assert limits(pool) == {"before": LIMIT}
    set_limit(pool, "after")
    calm(pool, reader, new)


def _everybody_has_read(pool: ManyMasters) -> None:
    """Standbys look at the store each half second; a change that they have seen shows in their roster's revision."""
    with pool.redis.client() as redis:
        name = next(key for key in redis.keys("*") if key.endswith(b"facts"))
        before = redis.hget(name, "revision")
    began = time.monotonic()
    with pool.redis.client() as redis:
        until(lambda: time.monotonic() - began > 1.5 and redis.hget(name, "revision") >= before)


def _policies_outlive_every_master(pool: ManyMasters) -> None:
    """What is in the store is enough to start from."""
    known = limits(pool)
    assert set(known) == {"before", "after"}
    for name in pool.names:
        pool.daemons[name].signal(signal.SIGKILL)
    for name in pool.names:
        pool.start_master(name)
    pool.leader(seconds=2 * TAKEOVER_S)
    until(lambda: limits(pool) == known)
    with AdminClient(pool.masters) as admin:
        until(lambda: admin.health().blocks >= COUNT)

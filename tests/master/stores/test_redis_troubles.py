"""A Redis that dies, stands still, comes back, wants a password or certificates, and one that Sentinels replace."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.master.journal import Journal
from kvstrata.master.messages import SaveNode
from kvstrata.master.stores.base import LeaderRecord
from kvstrata.master.stores.redis import OPEN_S, RedisStore
from kvstrata.master.stores.redis_client import ANSWER_S, CONNECT_S, LONG_S, SENTINEL_S
from kvstrata.master.stores.redis_url import parse_redis_url
from kvstrata.proto.errors import ConfigError, Unavailable
from tests.redis_server import RedisServer, Watched, make_certificates, needs_redis, until

NODE = SaveNode("n1", 1, 2, gone=False)
A, B = LeaderRecord("a"), LeaderRecord("b")
LONG_MS = 60_000
#: What a call may take on a busy machine beyond its own bound.
SLACK_S = 3.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[RedisServer]:
    """One that has what it has confirmed after a kill."""
    needs_redis()
    with RedisServer(tmp_path / "redis", "appendonly yes", "appendfsync always") as server:
        yield server


@pytest.fixture
def store(kept: RedisServer) -> Iterator[RedisStore]:
    opened = RedisStore(parse_redis_url(kept.url))
    yield opened
    opened.close()


def every_call(store: RedisStore) -> tuple[Callable[[], object], ...]:
    return (
        store.load, store.revision, store.leader, store.masters,
        lambda: store.save([NODE]), lambda: store.campaign(A, LONG_MS), lambda: store.resign(A),
        lambda: store.announce(A, LONG_MS),
    )  # fmt: skip


# ------------------------------------------------------------------ killed, stopped


def test_a_killed_redis_is_unavailable_at_once_and_back_when_it_is(kept: RedisServer, store: RedisStore) -> None:
    store.save([NODE])
    before = store.load()
    kept.kill()
    for call in every_call(store):
        started = time.monotonic()
        with pytest.raises(Unavailable, match=f"state store {store._where}: .*refused"):
            call()
        assert time.monotonic() - started < SLACK_S
    kept.start()
    assert store.load() == before, "no error for the connection that had died"
    store.save([NODE])
    assert store.cluster_id() and store.revision() == 2


def test_a_connection_that_died_unseen_costs_no_error(kept: RedisServer, store: RedisStore) -> None:
    for call in every_call(store):
        kept.kill()
        kept.start()
        call()


def test_a_redis_that_stands_still_holds_nobody_for_long(kept: RedisServer, store: RedisStore) -> None:
    store.save([NODE])
    kept.pause()
    try:
        for call in every_call(store):
            started = time.monotonic()
            with pytest.raises(Unavailable, match=r"[Tt]ime"):
                call()
            bound = LONG_S if call == store.load else ANSWER_S
            assert time.monotonic() - started < CONNECT_S + bound + SLACK_S
    finally:
        kept.resume()
    until(lambda: store.load().nodes == (NODE,))


def test_a_kill_in_the_middle_leaves_each_save_whole(kept: RedisServer, store: RedisStore) -> None:
    """Pairs of rows written together are equal, and what was confirmed is there."""
    confirmed = [0]

    def write() -> None:
        number = 0
        while True:
            number += 1
            try:
                store.save([SaveNode("left", number, 0, gone=False), SaveNode("right", number, 0, gone=False)])
            except Unavailable:
                return
            confirmed[0] = number

    for _ in range(3):
        confirmed[0] = 0
        writer = threading.Thread(target=write)
        writer.start()
        try:
            until(lambda: confirmed[0] > 20)
        finally:
            kept.kill()
            writer.join(10)
        assert not writer.is_alive()
        kept.start()
        left, right = store.load().nodes
        assert left.dram_bytes == right.dram_bytes >= confirmed[0]


def test_what_waits_in_the_journal_gets_in_when_redis_is_back(kept: RedisServer, store: RedisStore) -> None:
    journal = Journal(store)
    kept.kill()
    journal.add([NODE])
    assert not journal.flush() and "1 rows wait" in journal.problem()
    journal.add([SaveNode("n1", 5, 5, gone=True), SaveNode("n2", 1, 1, gone=False)])
    kept.start()
    assert journal.flush() and not journal.problem()
    assert store.load().nodes == (SaveNode("n1", 5, 5, gone=True), SaveNode("n2", 1, 1, gone=False))


def test_a_lease_outlives_a_restart_of_redis_and_ends_in_time(kept: RedisServer, store: RedisStore) -> None:
    led = store.campaign(A, LONG_MS)
    kept.kill()
    kept.start()
    assert store.campaign(B, LONG_MS) == led
    store.campaign(A, 300)
    kept.kill()
    kept.start()
    until(lambda: store.campaign(B, LONG_MS).master_id == "b")


# ------------------------------------------------------------------ opening


def test_opening_waits_for_a_redis_that_starts(tmp_path: Path) -> None:
    needs_redis()
    with RedisServer(tmp_path / "redis") as server:
        server.kill()
        opened: list[RedisStore] = []
        opener = threading.Thread(target=lambda: opened.append(RedisStore(parse_redis_url(server.url))))
        opener.start()
        server.start()
        opener.join(OPEN_S + SLACK_S)
        assert opened and opened[0].cluster_id()
        opened[0].close()


def test_opening_a_redis_that_is_not_there_ends_and_says_where(tmp_path: Path) -> None:
    needs_redis()
    with RedisServer(tmp_path / "redis", password="hunter2") as server:
        server.kill()
        with pytest.raises(Unavailable, match=rf"redis://:\*\*\*@{server.address}/0: .*refused"):
            RedisStore(parse_redis_url(server.url), wait_s=0.6)


def test_a_closed_store_has_no_connection_left(kept: RedisServer) -> None:
    with kept.client() as client:
        before = client.info("clients")["connected_clients"]
        opened = RedisStore(parse_redis_url(kept.url))
        opened.load()
        assert client.info("clients")["connected_clients"] > before
        opened.close()
        until(lambda: client.info("clients")["connected_clients"] == before)


# ------------------------------------------------------------------ passwords, TLS


def test_a_password_is_asked_for_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    needs_redis()
    with RedisServer(tmp_path / "redis", password="hunter2") as server:
        (tmp_path / "pw").write_text("hunter2\n")
        bare = f"redis://{server.address}"
        opened = RedisStore(parse_redis_url(bare, tmp_path / "pw"))
        opened.save([NODE])
        opened.close()
        for wrong in (bare, f"redis://:hunter3@{server.address}", f"redis://me:hunter2@{server.address}"):
            started = time.monotonic()
            with pytest.raises(ConfigError, match="correct the user and the password of --state") as caught:
                RedisStore(parse_redis_url(wrong))
            assert time.monotonic() - started < OPEN_S, "waiting would not help"
            assert "hunter" not in str(caught.value)
        server.kill()
        with pytest.raises(Unavailable) as gone:
            RedisStore(parse_redis_url(server.url), wait_s=0.6)
        assert "hunter" not in str(gone.value) and "hunter" not in caplog.text


def test_a_user_may_be_allowed_too_little(tmp_path: Path) -> None:
    needs_redis()
    rules = "user kv on >hunter2 ~kvstrata:* +@all -eval -evalsha -script"
    with RedisServer(tmp_path / "redis", rules) as server, pytest.raises(ConfigError, match="correct the user"):
        RedisStore(parse_redis_url(f"redis://kv:hunter2@{server.address}"))
    rules = "user kv on >hunter2 ~kvstrata:* +@read +@write +@scripting +@connection +time +info +wait"
    with RedisServer(tmp_path / "two", rules) as server:
        opened = RedisStore(parse_redis_url(f"redis://kv:hunter2@{server.address}"))
        for call in every_call(opened):
            call()
        opened.close()


def _tls(server: RedisServer, certificates: Path, ca: str = "ca", who: str = "client") -> str:
    files = f"ca={certificates / ca}.crt&cert={certificates / who}.crt&key={certificates / who}.key"
    return f"rediss://:hunter2@{server.address}/0?{files}"


def test_over_tls_both_sides_are_who_they_say(tmp_path: Path, certificates: Path) -> None:
    needs_redis()
    with RedisServer(tmp_path / "redis", password="hunter2", certificates=certificates) as server:
        opened = RedisStore(parse_redis_url(_tls(server, certificates)))
        opened.save([NODE])
        assert opened.load().nodes == (NODE,)
        opened.close()
        with pytest.raises(ConfigError, match=r"CERTIFICATE_VERIFY_FAILED.*correct --state"):
            RedisStore(parse_redis_url(_tls(server, certificates, ca="stranger")))
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
            RedisStore(parse_redis_url(f"rediss://:hunter2@{server.address}"))
        for refused in (
            _tls(server, certificates, who="stranger"),
            f"rediss://:hunter2@{server.address}?ca={certificates / 'ca.crt'}",
            f"redis://:hunter2@{server.address}",
        ):
            with pytest.raises((Unavailable, ConfigError)) as caught:
                RedisStore(parse_redis_url(refused), wait_s=0.0)
            assert "hunter" not in str(caught.value)


def test_a_certificate_of_another_host_is_refused_unless_told(tmp_path: Path, certificates: Path) -> None:
    needs_redis()
    with RedisServer(tmp_path / "redis", password="hunter2", certificates=certificates) as server:
        url = _tls(server, certificates).replace("127.0.0.1", "localhost")
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
            RedisStore(parse_redis_url(url))
        RedisStore(parse_redis_url(f"{url}&check_hostname=no")).close()


# ------------------------------------------------------------------ Sentinels


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Watched]]:
    """Makes what Sentinels watch over."""
    needs_redis()
    made: list[Watched] = []

    def make() -> Watched:
        made.append(Watched(tmp_path_factory.mktemp("watched"), "hunter2", "watchword"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _sentinel_url(pool: Watched) -> str:
    return f"redis+sentinel://:hunter2@{pool.hosts}/{pool.SERVICE}/0?sentinel_password=watchword"


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_sentinels_put_the_replica_in_place_and_policy_is_there(watched: Callable[[], Watched], how: str) -> None:
    pool = watched()
    store = RedisStore(parse_redis_url(f"{_sentinel_url(pool)}&replicas=1"))
    store.save([NODE], store.campaign(A, LONG_MS).epoch)
    before = store.load()
    pool.first.kill() if how == "killed" else pool.first.pause()
    lost = 0
    deadline = time.monotonic() + 30
    while True:
        started = time.monotonic()
        try:
            found = store.load()
            break
        except Unavailable:
            lost += 1
        assert time.monotonic() - started < CONNECT_S + LONG_S + 3 * SENTINEL_S + SLACK_S, "bounded"
        assert time.monotonic() < deadline, "no failover"
        time.sleep(0.05)
    assert lost and found == before, "also the epoch"
    assert store.campaign(B, LONG_MS).master_id == "a", "the lease too"
    with pytest.raises(Unavailable, match="0 replicas have the write"):
        store.save([SaveNode("n2", 1, 1, gone=False)])
    if how == "killed":
        pool.first.start()
        _until_saved(store)
        with pool.first.client() as client:
            assert client.info("replication")["role"] == "slave"
    else:  # it takes itself for the master for a while: nobody asks it
        pool.first.resume()
        again = RedisStore(parse_redis_url(_sentinel_url(pool)))
        for number in range(20):
            again.save([SaveNode(f"later-{number}", 1, 1, gone=False)])
        with pool.second.client() as client:
            assert client.hlen("kvstrata:{main}:nodes") == 22
        again.close()
    store.close()


def _until_saved(store: RedisStore) -> None:
    """The old one has become a replica of the new one, and has what is written."""
    deadline = time.monotonic() + 30
    while True:
        try:
            store.save([NODE])
            return
        except Unavailable:
            assert time.monotonic() < deadline, "no second copy"
        time.sleep(0.05)


def test_sentinels_that_do_not_answer_or_know_nothing_are_passed_over(watched: Callable[[], Watched]) -> None:
    pool = watched()
    store = RedisStore(parse_redis_url(_sentinel_url(pool)))
    pool.sentinels[0].kill()
    pool.sentinels[1].pause()
    with pool.first.client() as client:  # what the store has is closed: it must ask where to connect
        client.client_kill_filter(_type="normal", skipme=True)
    store.save([NODE])
    pool.sentinels[2].pause()
    assert store.revision() == 1, "what is connected needs none of them"
    with pool.first.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    started = time.monotonic()
    with pytest.raises(Unavailable, match="no Sentinel that answers knows a living kv"):
        store.load()
    assert time.monotonic() - started < 2 * 3 * SENTINEL_S + SLACK_S
    for sentinel in pool.sentinels[1:]:
        sentinel.resume()
    until(lambda: _answers(store))
    store.close()
    for wrong in (_sentinel_url(pool).replace("watchword", "hunter2"), _sentinel_url(pool).replace("/kv/", "/other/")):
        with pytest.raises((ConfigError, Unavailable)) as caught:
            RedisStore(parse_redis_url(wrong), wait_s=0.0)
        assert "hunter" not in str(caught.value) and "watchword" not in str(caught.value)


def test_sentinels_over_tls(tmp_path: Path, certificates: Path) -> None:
    needs_redis()
    with Watched(tmp_path, "hunter2", sentinels=1, certificates=certificates) as pool:
        files = f"ca={certificates / 'ca.crt'}&cert={certificates / 'client.crt'}&key={certificates / 'client.key'}"
        url = f"rediss+sentinel://:hunter2@{pool.hosts}/{pool.SERVICE}?{files}"
        store = RedisStore(parse_redis_url(f"{url}&replicas=1"))
        store.save([NODE])
        assert store.load().nodes == (NODE,)
        store.close()
        with pytest.raises(Unavailable, match="no Sentinel that answers"):
            RedisStore(parse_redis_url(url.replace("ca.crt", "stranger.crt")), wait_s=0.0)


def _answers(store: RedisStore) -> bool:
    try:
        return store.revision() == 1
    except Unavailable:
        return False


def test_no_process_of_a_test_is_left(tmp_path: Path) -> None:
    needs_redis()
    server = RedisServer(tmp_path / "redis")
    pid = server.pid
    server.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

"""The engine's thread over an agent that misbehaves: what callers see, and what is kept for whom."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstrata.proto.errors import Closed, InvalidArgument, Unavailable, VersionMismatch
from kvstrata.transfer.memory import Memory
from kvstrata.transfer.rdma import owner
from kvstrata.transfer.rdma.engine import JobState, Pieces
from kvstrata.transfer.rdma.envelope import seal
from kvstrata.transfer.rdma.jobs import RailJob
from kvstrata.transfer.rdma.ledger import POSTED_PER_PEER, WAITING_MAX
from kvstrata.transfer.rdma.owner import Owner
from tests.transfer.rdma.fake_agent import FakeAgent
from tests.waiting import until

SOON_S = 20.0
BASE = 1 << 20


def piece(at: int = BASE, length: int = 64, memory: Memory | None = None) -> Pieces:
    return Pieces(np.array([at]), np.array([length]), memory or Memory())


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def engine(agent: FakeAgent) -> Iterator[Owner]:
    """With memory of 4 KiB at BASE, and the agents "good" and "slow"."""
    engine = Owner("me", "cma", "UCX", lambda: agent)
    engine.register(BASE, 4096)
    for name in ("good", "slow"):
        assert engine.add_peer(seal("1.5.0", f"agent {name}".encode())) == name
    agent.plan["slow"] = "later"
    yield engine
    engine.close(0.0)
    agent.finish("slow")
    until(lambda: agent.closed)
    assert agent.wrong == []


def wait(job: object) -> bool:
    return job.wait(time.monotonic() + SOON_S)  # type: ignore[attr-defined, no-any-return]


def test_a_read_ends_and_says_so_to_all_who_asked(engine: Owner) -> None:
    called: list[str] = []
    job = engine.read("good", piece(), piece())
    job.then(lambda: called.append("first"))
    assert wait(job) and job.settled() and job.state is JobState.DONE and job.problem == ""
    job.then(lambda: called.append("late"))
    until(lambda: len(called) == 2)
    assert job.give_up()
    health = engine.health()
    assert (health["done"], health["failed"], health["unsettled"], health["bytes_read"]) == (1, 0, 0, 64)
    assert health["kind"] == "cma" and health["problem"] == "" and health["registered_bytes"] == 4096


def test_a_read_that_is_alone_is_posted_by_its_caller(engine: Owner, agent: FakeAgent) -> None:
    posted_by, plain = [], agent.post

    def post(transfer: object) -> bool:
        posted_by.append(threading.get_ident())
        return plain(transfer)

    agent.post = post  # type: ignore[method-assign]

    def read() -> None:
        assert all(wait(engine.read("good", piece(), piece())) for _ in range(20))

    caller = threading.Thread(target=read)
    caller.start()
    ident = caller.ident
    caller.join(SOON_S)
    assert ident in posted_by and len(posted_by) == 20
    read()
    assert threading.get_ident() not in posted_by, "a signal's handler may raise there, in the middle of it"


def test_a_client_that_is_collected_in_the_middle_of_the_owners_work(engine: Owner, agent: FakeAgent) -> None:
    job = engine.read("slow", piece(), piece())
    until(agent.running)
    memory = engine.register(BASE + 4096, 64)
    with engine._lock:  # where an allocation may run finalizers
        engine.remove_peer("good")
        memory.close()
        job.give_up()
        engine.close(5.0)
    until(lambda: "good" not in agent.peers and len(agent.memory) == 1)
    agent.finish("slow")
    until(lambda: agent.closed)


def test_who_comes_while_a_caller_copies_waits_no_longer_than_it_wants(engine: Owner, agent: FakeAgent) -> None:
    """Within a host a read is a copy that its caller makes."""
    copying, go_on, plain = threading.Event(), threading.Event(), agent.post

    def post(transfer: object) -> bool:
        if not go_on.is_set():
            copying.set()
            assert go_on.wait(SOON_S)
        return plain(transfer)

    agent.post = post  # type: ignore[method-assign]
    first: list[RailJob] = []
    caller = threading.Thread(target=lambda: first.append(engine.read("good", piece(), piece())))
    caller.start()
    assert copying.wait(SOON_S)
    try:
        second = engine.read("good", piece(), piece())
        assert not second.wait(time.monotonic() + 0.05)
        dropped = engine.read("good", piece(), piece())
        assert dropped.give_up() and dropped.state is JobState.DROPPED
    finally:
        go_on.set()
    caller.join(SOON_S)
    assert first[0].state is JobState.DONE and wait(second) and second.state is JobState.DONE


def test_a_stopped_peer_keeps_no_other_one_waiting(engine: Owner, agent: FakeAgent) -> None:
    stuck = [engine.read("slow", piece(), piece()) for _ in range(POSTED_PER_PEER + 5)]
    assert wait(engine.read("good", piece(), piece()))
    until(lambda: len(agent.running()) == POSTED_PER_PEER)
    assert [job.give_up() for job in stuck] == [False] * POSTED_PER_PEER + [True] * 5
    assert stuck[0].state is JobState.POSTED and stuck[-1].state is JobState.DROPPED and stuck[-1].problem
    assert not stuck[0].wait(time.monotonic() + 0.01)
    agent.finish("slow")
    assert all(wait(job) for job in stuck) and stuck[0].state is JobState.DONE


def test_memory_and_peer_stay_until_the_last_transfer_that_names_them(engine: Owner, agent: FakeAgent) -> None:
    memory = engine.register(BASE + 4096, 4096)
    jobs = [engine.read("slow", piece(BASE + 4096), piece()) for _ in range(2)]
    until(lambda: len(agent.running()) == 2)
    memory.close()
    memory.close()
    engine.remove_peer("slow")
    engine.remove_peer("slow")
    assert engine.read("slow", piece(), piece()).state is JobState.DROPPED
    assert engine.read("good", piece(BASE + 4096), piece()).state is JobState.DROPPED
    agent.finish("slow", 1)
    assert wait(jobs[0])
    assert wait(engine.read("good", piece(), piece()))
    assert len(agent.memory) == 2 and "slow" in agent.peers
    agent.finish("slow")
    assert wait(jobs[1])
    until(lambda: len(agent.memory) == 1 and "slow" not in agent.peers)


def test_a_peer_that_comes_back_is_kept(engine: Owner, agent: FakeAgent) -> None:
    job = engine.read("slow", piece(), piece())
    until(agent.running)
    engine.remove_peer("slow")
    engine.add_peer(seal("1.5.1", b"agent slow"))
    agent.finish("slow")
    assert wait(job)
    agent.plan["slow"] = "at once"
    assert wait(engine.read("slow", piece(), piece())) and "slow" in agent.peers


@pytest.mark.parametrize("plan", ["gone", "dies", "refused"])
def test_a_peer_that_is_gone_fails_its_jobs_alone(engine: Owner, agent: FakeAgent, plan: str) -> None:
    agent.plan["slow"] = plan
    job = engine.read("slow", piece(), piece())
    assert wait(job) and job.state is JobState.FAILED and job.problem
    other = engine.read("good", piece(), piece())
    assert wait(other) and other.state is JobState.DONE
    assert engine.health()["failed"] == 1 and engine.problem() == ""


def test_memory_of_a_read_that_failed_lingers(agent: FakeAgent) -> None:
    engine = Owner("me", "rdma", "UCX", lambda: agent, linger_s=0.2)
    memory = engine.register(BASE, 4096)
    agent.plan[engine.add_peer(seal("1.5.1", b"agent bad"))] = "gone"
    began = time.monotonic()
    job = engine.read("bad", piece(), piece())
    until(lambda: agent.transfers)
    memory.close()
    assert wait(job) and job.state is JobState.FAILED
    assert time.monotonic() - began >= 0.2
    engine.close()
    assert agent.closed and agent.wrong == []


def test_what_is_asked_wrongly_is_refused_at_once(engine: Owner) -> None:
    with pytest.raises(InvalidArgument, match="pair"):
        engine.read("good", piece(length=64), piece(length=65))
    with pytest.raises(InvalidArgument):
        engine.register(0, 4096)
    with pytest.raises(Unavailable, match="no such device"):
        engine.register(BASE, 64, Memory("cuda", 99))
    for problem, job in {
        "not known": engine.read("stranger", piece(), piece()),
        "not registered": engine.read("good", piece(BASE + 4090), piece()),
        "is not": engine.read("good", piece(memory=Memory("cuda", 0)), piece()),
    }.items():
        assert job.state is JobState.DROPPED and job.settled() and problem in job.problem


def test_waiting_has_a_bound(engine: Owner, agent: FakeAgent) -> None:
    jobs = [engine.read("slow", piece(), piece()) for _ in range(WAITING_MAX + POSTED_PER_PEER + 10)]
    refused = [job for job in jobs if job.state is JobState.DROPPED]
    assert refused and "wait already" in refused[0].problem
    assert len(jobs) - len(refused) <= WAITING_MAX + POSTED_PER_PEER
    engine.remove_peer("slow")
    agent.finish("slow")
    assert all(wait(job) for job in jobs)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "stranger", "inside"])
def test_damaged_metadata_never_reaches_the_agent(engine: Owner, damage: str) -> None:
    whole = seal("1.5.1", b"agent other")
    sent = {
        "flip": whole[:-1] + b"\0",
        "cut": whole[:-2],
        "empty": b"",
        "stranger": b"x" * 100,
        "inside": seal("1.5.1", b"garbage"),
    }[damage]
    with pytest.raises(InvalidArgument):
        engine.add_peer(sent)


def test_an_agent_that_cannot_be_reached_may_be_later(engine: Owner) -> None:
    with pytest.raises(Unavailable, match="connection refused"):
        engine.add_peer(seal("1.5.1", b"agent dead"))


def test_another_nixl_is_not_spoken_to(engine: Owner) -> None:
    with pytest.raises(VersionMismatch, match=r"1\.4\.0"):
        engine.add_peer(seal("1.4.0", b"agent other"))


def test_a_failing_agent_shows_and_is_forgiven(engine: Owner, agent: FakeAgent) -> None:
    agent.fails = "no more progress"
    until(lambda: "no more progress" in engine.problem())
    assert wait(engine.read("good", piece(), piece()))
    agent.fails = ""
    until(lambda: engine.problem() == "")


def test_a_thread_that_hangs_in_the_agent_shows(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "STUCK_S", 0.2)
    go_on, progress = threading.Event(), agent.progress
    engine = Owner("me", "cma", "UCX", lambda: agent)
    until(lambda: agent.progressed)
    assert engine.problem() == ""

    def hangs() -> None:
        go_on.wait(SOON_S)
        progress()

    monkeypatch.setattr(agent, "progress", hangs)
    until(lambda: "no turn for" in engine.problem())
    assert "no turn for" in str(engine.health()["problem"])
    go_on.set()
    until(lambda: engine.problem() == "")
    engine.close()
    assert agent.closed


def test_an_idle_agent_answers_others_and_stirred_more_often(engine: Owner, agent: FakeAgent) -> None:
    before = agent.progressed
    until(lambda: agent.progressed >= before + 3)
    engine.stir()
    before = agent.progressed
    until(lambda: agent.progressed >= before + 20)


# ------------------------------------------------------------ the end


def test_close_leaves_unsettled_transfers_their_memory(agent: FakeAgent) -> None:
    engine = Owner("me", "cma", "UCX", lambda: agent)
    engine.register(BASE, 4096)
    agent.plan[engine.add_peer(seal("1.5.1", b"agent slow"))] = "later"
    jobs = [engine.read("slow", piece(), piece()) for _ in range(POSTED_PER_PEER + 3)]
    until(lambda: len(agent.running()) == POSTED_PER_PEER)
    engine.close(0.05)
    assert [job.state for job in jobs[-3:]] == [JobState.DROPPED] * 3
    assert not jobs[0].settled() and not agent.closed and len(agent.memory) == 1
    with pytest.raises(Closed):
        engine.read("slow", piece(), piece())
    with pytest.raises(Closed):
        engine.register(BASE, 64)
    agent.finish("slow")
    assert all(wait(job) for job in jobs) and jobs[0].state is JobState.DONE
    until(lambda: agent.closed)
    engine.close()
    engine.remove_peer("slow")
    assert agent.wrong == []


def test_calls_that_wait_when_it_closes_are_answered(agent: FakeAgent) -> None:
    engine = Owner("me", "cma", "UCX", lambda: agent)
    errors: list[type[BaseException]] = []

    def ask() -> None:
        while not errors:
            try:
                engine.connection()
            except BaseException as error:  # noqa: BLE001  the test looks at what it is
                errors.append(type(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    engine.close()
    for thread in threads:
        thread.join(SOON_S)
    assert set(errors) == {Closed}


def test_an_agent_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> FakeAgent:
        raise Unavailable("no NIXL here")

    with pytest.raises(Unavailable, match="no NIXL here"):
        Owner("me", "cma", "UCX", fails)
    monkeypatch.setattr(owner, "OPEN_S", 0.05)
    go_on, agent = threading.Event(), FakeAgent()

    def hangs() -> FakeAgent:
        go_on.wait(SOON_S)
        return agent

    with pytest.raises(Unavailable, match="did not start"):
        Owner("me", "cma", "UCX", hangs)
    go_on.set()
    until(lambda: agent.closed)


def test_a_call_that_takes_too_long_leaves_nothing_behind(
    engine: Owner, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "REGISTER_S", 0.05)
    go_on, register = threading.Event(), agent.register

    def slow(address: int, nbytes: int, memory: Memory) -> object:
        go_on.wait(SOON_S)
        return register(address, nbytes, memory)

    monkeypatch.setattr(agent, "register", slow)
    with pytest.raises(Unavailable, match="did not answer"):
        engine.register(BASE + 8192, 4096)
    with pytest.raises(Unavailable, match="did not answer"):
        engine.register(BASE + 16384, 4096)
    go_on.set()
    monkeypatch.setattr(owner, "REGISTER_S", SOON_S)
    engine.register(BASE + 32768, 4096)
    until(lambda: {address for address, _, _ in agent.memory.values()} == {BASE, BASE + 32768})


def test_a_forked_child_is_told_and_ends_nothing(engine: Owner, agent: FakeAgent) -> None:
    job = engine.read("slow", piece(), piece())
    until(agent.running)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            engine.health()
            engine.close()
            engine.remove_peer("slow")
            job.give_up()
            try:
                engine.read("good", piece(), piece())
            except Closed:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    agent.finish("slow")
    assert wait(job) and wait(engine.read("good", piece(), piece()))

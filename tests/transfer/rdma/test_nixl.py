"""Real agents in real processes, over cross-memory attach: bytes both ways, and peers that are stopped or killed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.proto.errors import Closed, InvalidArgument, Unavailable
from kvstrata.transfer.rdma import nixl
from kvstrata.transfer.rdma.engine import JobState, Pieces
from kvstrata.transfer.rdma.found import cma_problem, find_rails
from kvstrata.transfer.rdma.owner import Owner, open_engine
from kvstrata.transfer.rdma.pattern import mismatch, pattern
from tests.transfer.rdma.other_agent import CMA, ROOT, Other

pytestmark = pytest.mark.skipif(
    bool(not nixl.installed() or cma_problem()), reason=cma_problem() or "NIXL is not installed"
)

SOON_S = 20.0
NBYTES = 4 << 20
SEED = 77


class Here:
    """This process's engine, with memory of NBYTES registered."""

    def __init__(self) -> None:
        self.engine = open_engine("here", find_rails(CMA), CMA)
        self.bytes = np.zeros(NBYTES, np.uint8)
        self.memory = self.engine.register(self.bytes.ctypes.data, NBYTES)

    def local(self, at: np.ndarray, length: np.ndarray) -> Pieces:
        return Pieces(at + self.bytes.ctypes.data, length)

    def whole(self, peer: str, other: Other) -> object:
        at, length = np.array([0]), np.array([NBYTES])
        return self.engine.read(peer, self.local(at, length), Pieces(at + other.address, length))


@pytest.fixture
def here() -> Iterator[Here]:
    here = Here()
    yield here
    here.engine.close()


@pytest.fixture
def start() -> Iterator[Callable[[], Other]]:
    started: list[Other] = []

    def one() -> Other:
        started.append(Other(NBYTES, SEED))
        return started[-1]

    yield one
    for other in started:
        other.close()


def wait(job: object) -> bool:
    return job.wait(time.monotonic() + SOON_S)  # type: ignore[attr-defined, no-any-return]


def some_pieces(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Targets that do not overlap, sources that may, lengths: i64[count] each."""
    cuts = np.sort(rng.choice(NBYTES, 2 * count, replace=False))
    target, length = cuts[::2], cuts[1::2] - cuts[::2]
    order = rng.permutation(count)
    source = rng.integers(0, NBYTES - length.max(), count)
    return target[order], source, length[order]


def expected(source_bytes: np.ndarray, target: np.ndarray, source: np.ndarray, length: np.ndarray) -> np.ndarray:
    out = np.zeros(NBYTES, np.uint8)
    for to, origin, count in zip(target.tolist(), source.tolist(), length.tolist(), strict=True):
        out[to : to + count] = source_bytes[origin : origin + count]
    return out


@pytest.mark.parametrize("count", [1, 7, 1500])
def test_pieces_arrive_where_they_belong_both_ways(here: Here, start: Callable[[], Other], count: int) -> None:
    other, rng = start(), np.random.default_rng(count)
    peer = here.engine.add_peer(other.metadata)
    target, source, length = some_pieces(rng, count)
    job = here.engine.read(peer, here.local(target, length), Pieces(source + other.address, length))
    assert wait(job) and job.state is JobState.DONE, job.problem
    assert np.array_equal(here.bytes, expected(pattern(SEED, NBYTES), target, source, length))

    here.bytes[:] = rng.integers(0, 256, NBYTES, np.uint8)
    told = other.ask(
        "read",
        metadata=here.engine.metadata().hex(),
        target=target.tolist(),
        source=(source + here.bytes.ctypes.data).tolist(),
        length=length.tolist(),
    )
    assert told["state"] == "done", told["problem"]
    assert np.array_equal(
        np.frombuffer(bytes.fromhex(told["bytes"]), np.uint8), expected(here.bytes, target, source, length)
    )


def test_memory_registered_later_is_told_apart(here: Here, start: Callable[[], Other]) -> None:
    """The connection once, then memory by memory; closed and registered again at the same place."""
    other = start()
    more = pattern(5, 4096).copy()
    for _ in range(2):
        memory = here.engine.register(more.ctypes.data, more.nbytes)
        for metadata in (here.engine.connection(), memory.metadata):
            told = other.ask(
                "read", metadata=metadata.hex(), target=[64], source=[more.ctypes.data], length=[more.nbytes]
            )
        assert told["state"] == "done", told
        assert mismatch(np.frombuffer(bytes.fromhex(told["bytes"]), np.uint8)[64 : 64 + 4096], 5) == ""
        memory.close()
    told = other.ask("read", metadata=here.engine.connection().hex(), target=[0], source=[16], length=[64])
    assert told["state"] == "failed" and told["problem"]


def test_a_killed_peer_fails_what_it_had_and_no_other(here: Here, start: Callable[[], Other]) -> None:
    other, well = start(), start()
    peer, healthy = here.engine.add_peer(other.metadata), here.engine.add_peer(well.metadata)
    assert wait(here.whole(peer, other))
    jobs = [here.whole(peer, other) for _ in range(40)]
    other.kill()
    jobs += [here.whole(peer, other) for _ in range(3)]
    assert all(wait(job) for job in jobs)
    assert {job.state for job in jobs} <= {JobState.DONE, JobState.FAILED}  # type: ignore[attr-defined]
    assert jobs[-1].state is JobState.FAILED and jobs[-1].problem  # type: ignore[attr-defined]
    here.engine.remove_peer(peer)
    here.bytes[:] = 0
    assert wait(here.whole(healthy, well)) and mismatch(here.bytes, SEED) == ""
    assert here.engine.problem() == "" and here.engine.health()["unsettled"] == 0


def test_a_peer_that_is_gone_when_it_is_added(here: Here, start: Callable[[], Other]) -> None:
    other = start()
    other.kill()
    with pytest.raises(Unavailable):
        here.engine.add_peer(other.metadata)


def test_a_peer_killed_before_the_first_contact(here: Here, start: Callable[[], Other]) -> None:
    other = start()
    peer = here.engine.add_peer(other.metadata)
    other.kill()
    job = here.whole(peer, other)
    assert wait(job) and job.state is JobState.FAILED  # type: ignore[attr-defined]


def test_a_peer_stopped_before_the_first_contact_goes_on(here: Here, start: Callable[[], Other]) -> None:
    other, well = start(), start()
    peer = here.engine.add_peer(other.metadata)
    other.stop()
    job = here.whole(peer, other)
    assert not job.wait(time.monotonic() + 0.3)  # type: ignore[attr-defined]
    assert not job.give_up() and job.state is JobState.POSTED  # type: ignore[attr-defined]
    here.memory.close()
    here.engine.remove_peer(peer)
    assert here.engine.health()["registered_bytes"] == NBYTES

    memory = here.engine.register(here.bytes.ctypes.data, NBYTES)
    healthy = here.engine.add_peer(well.metadata)
    assert wait(here.whole(healthy, well))
    memory.close()
    other.go_on()
    assert wait(job) and job.state is JobState.DONE  # type: ignore[attr-defined]
    assert mismatch(here.bytes, SEED) == ""
    deadline = time.monotonic() + SOON_S
    while here.engine.health()["registered_bytes"] or here.engine.health()["peers"] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_peer_stopped_before_the_first_contact_dies(here: Here, start: Callable[[], Other]) -> None:
    other = start()
    peer = here.engine.add_peer(other.metadata)
    other.stop()
    job = here.whole(peer, other)
    assert not job.wait(time.monotonic() + 0.2)  # type: ignore[attr-defined]
    other.kill()
    assert wait(job) and job.state is JobState.FAILED  # type: ignore[attr-defined]


def test_a_peer_stopped_after_the_first_contact(here: Here, start: Callable[[], Other]) -> None:
    other = start()
    peer = here.engine.add_peer(other.metadata)
    assert wait(here.whole(peer, other))
    other.stop()
    job = here.whole(peer, other)
    job.wait(time.monotonic() + 0.2)  # type: ignore[attr-defined]  the kernel reads stopped processes as well
    other.go_on()
    assert wait(job) and job.state is JobState.DONE and mismatch(here.bytes, SEED) == ""  # type: ignore[attr-defined]


def test_readers_that_die_harm_nobody(here: Here, start: Callable[[], Other]) -> None:
    here.bytes[:] = pattern(SEED, NBYTES)
    for reads in (0, 1, 5):
        reader = start()
        reader.tell("read on", metadata=here.engine.metadata().hex(), source=here.bytes.ctypes.data)
        here.engine.stir()
        assert all(reader.answer()["state"] == "done" for _ in range(reads))
        reader.kill()
    other = start()
    peer = here.engine.add_peer(other.metadata)
    assert wait(here.whole(peer, other)) and here.engine.problem() == ""
    assert mismatch(here.bytes, SEED) == ""


def test_garbage_does_not_end_the_process(here: Here, start: Callable[[], Other]) -> None:
    whole, rng = start().metadata, np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[int(rng.integers(len(whole)))] ^= int(rng.integers(1, 256))
        with pytest.raises(InvalidArgument):
            here.engine.add_peer(bytes(damaged[: int(rng.integers(len(whole) // 2, len(whole) + 1))]))
    with pytest.raises(InvalidArgument):
        here.engine.add_peer(here.engine.metadata())  # itself


def test_a_forked_child_leaves_its_parents_agent_alone(here: Here, start: Callable[[], Other]) -> None:
    other = start()
    peer = here.engine.add_peer(other.metadata)
    assert wait(here.whole(peer, other))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            here.memory.close()
            here.engine.close()
            try:
                here.engine.add_peer(other.metadata)
            except Closed:
                code = 0
            here.engine = None  # type: ignore[assignment]
            gc.collect()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    here.bytes[:] = 0
    assert wait(here.whole(peer, other)) and mismatch(here.bytes, SEED) == ""


def test_engines_that_come_and_go_leave_nothing(start: Callable[[], Other]) -> None:
    other, names = start(), set()
    counts: list[list[int]] = []
    for _ in range(8):
        here = Here()
        names.add(here.engine.name)
        assert wait(here.whole(here.engine.add_peer(other.metadata), other))
        here.engine.close()
        counts.append([len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")])
    for last, second in zip(counts[-1], counts[1], strict=True):
        assert last < second + 6, f"one or more a round: {counts}"
    assert len(names) == 8
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstrata-rails"]


ENDS = """
import os, signal, sys, time
import numpy as np
from kvstrata.transfer.rdma.engine import Pieces
from kvstrata.transfer.rdma.found import find_rails
from kvstrata.transfer.rdma.owner import open_engine
from tests.transfer.rdma.other_agent import CMA
engine = open_engine("ends", find_rails(CMA), CMA)
target = np.zeros(4096, np.uint8)
engine.register(target.ctypes.data, 4096)
peer = engine.add_peer(bytes.fromhex(sys.argv[2]))
if int(sys.argv[5]):
    os.kill(int(sys.argv[5]), signal.SIGKILL)
length = np.array([4096])
job = engine.read(peer, Pieces(np.array([target.ctypes.data]), length), Pieces(np.array([int(sys.argv[3])]), length))
job.wait(time.monotonic() + float(sys.argv[4]))
if sys.argv[1] == "close":
    engine.close(0.1)
print(job.state.value)
"""


@pytest.mark.parametrize(("peer", "state"), [("well", "done"), ("stopped", "posted"), ("killed", "failed")])
@pytest.mark.parametrize("how", ["close", "leave"])
def test_a_process_ends_well_whatever_its_peer_does(
    start: Callable[[], Other], how: str, peer: str, state: str
) -> None:
    """And its standard output is its own: UCX complains elsewhere."""
    other, wait_s = start(), "0.2" if peer == "stopped" else "10"
    victim = str(other.process.pid) if peer == "killed" else "0"
    if peer == "stopped":
        other.stop()
    done = subprocess.run(
        [sys.executable, "-c", ENDS, how, other.metadata.hex(), str(other.address), wait_s, victim],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [state]
    if peer != "killed":
        other.go_on()
        assert other.ask("health")["problem"] == ""


def test_the_environment_is_as_before() -> None:
    before = os.environ.get("UCX_TLS")
    engine: Owner = open_engine("x", find_rails(CMA), CMA)
    engine.close()
    assert os.environ.get("UCX_TLS") == before

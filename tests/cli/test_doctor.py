"""The doctor on real processes with things broken on purpose, and nodes that are asked to check themselves."""

from __future__ import annotations

import email.utils
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli.doctor import cluster, disk, machine, ports, reach
from kvstrata.cli.doctor.rows import Check, Row, Verdict, run
from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.storage import huge_pages
from tests import command_line
from tests.e2e.real_pool import READY_S
from tests.e2e.tiered_pool import SSD_SLOT, Tenant, TieredPool
from tests.waiting import until

KVSTRATA = (sys.executable, "-m", "kvstrata.cli.app")


def two_nodes(base: Path) -> Iterator[TieredPool]:
    one = TieredPool(base, nodes=2, more=("--ssd-policy", "write-through", "--scrub-rate", "0"))
    yield one
    one.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredPool]:
    yield from two_nodes(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def pool(shared: TieredPool) -> Iterator[TieredPool]:
    """One that is well, and is left so: whatever was stopped goes on, and is active."""
    yield shared
    for daemon in shared.daemons.values():
        daemon.process.send_signal(signal.SIGCONT)
    with AdminClient(shared.address) as admin:
        until(lambda: [row.state for row in admin.nodes()] == ["active", "active"], READY_S)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[TieredPool]:
    """Nothing was ever stored there."""
    yield from two_nodes(tmp_path)


@pytest.fixture(scope="module")
def crippled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredPool]:
    """Its first node is dead."""
    for one in two_nodes(tmp_path_factory.mktemp("crippled")):
        _ = node_id(one, 0)
        one.kill("node0")
        yield one


def called(*arguments: str) -> tuple[int, Any]:
    """(exit code, what it printed, as JSON where it is)."""
    done = command_line.run(*arguments, env={"COLUMNS": "240"})
    return done.returncode, as_json(done.stdout, done.stderr)


def called_process(*arguments: str, limit: Callable[[], None] | None = None) -> tuple[int, Any]:
    """The same in a process of its own, whose limits may be set."""
    wide = {**os.environ, "COLUMNS": "240"}
    done = subprocess.run(
        [*KVSTRATA, *arguments], capture_output=True, text=True, timeout=60, check=False, preexec_fn=limit, env=wide
    )
    return done.returncode, as_json(done.stdout, done.stderr)


def as_json(stdout: str, stderr: str) -> Any:
    try:
        return json.loads(stdout)
    except json.JSONDecodeError:
        return stdout + stderr


def doctor(
    *arguments: str, limit: Callable[[], None] | None = None, own_process: bool = False
) -> tuple[int, dict[str, dict[str, str]]]:
    """(exit code, rows by what they are of)."""
    call = partial(called_process, limit=limit) if own_process or limit is not None else called
    code, told = call("doctor", "--json", *arguments)
    assert isinstance(told, dict), told
    rows = {row["what"]: row for row in told["rows"]}
    assert told["healthy"] == (code == 0) == all(row["verdict"] != "problem" for row in told["rows"])
    assert all(row["advice"] for row in told["rows"] if row["verdict"] in ("problem", "warning"))
    return code, rows


def node_id(pool: TieredPool, index: int) -> str:
    return str(pool.node(index).ready["node_id"])


# ---------------------------------------------------------------- a cluster that is well


def test_a_sound_cluster_is_reached_every_way(pool: TieredPool) -> None:
    listen = ",".join(str(pool.daemons["master"].ready[port]) for port in ("channel", "grpc", "http"))
    code, rows = doctor("--master", pool.address, "--round-trip", "--listen", listen)
    assert code == 0, [row for row in rows.values() if row["verdict"] == "problem"]
    for index in range(2):
        name = node_id(pool, index)
        for way in ("tcp", "shm", "HTTP", "wall clock", "round trip by tcp", "round trip by shm"):
            assert rows[f"{name}: {way}"]["verdict"] == "ok", rows[f"{name}: {way}"]
    for way in ("channel", "gRPC", "HTTP"):
        assert rows[f"{pool.address}: {way}"]["verdict"] == "ok"
    assert "2 of 2 nodes active" in rows[f"{pool.address}: gRPC"]["found"]
    for address in listen.split(","):
        assert rows[address]["verdict"] == "ok" and "kvstrata itself" in rows[address]["found"]
    code, told = called_process("doctor", "--master", pool.address)
    assert code == 0 and "what to do" in told and told.rstrip().splitlines()[-1].startswith("0 problems")
    code, rows = doctor("--master", str(pool.node(0).ready["channel"]))
    (row,) = [row for row in rows.values() if row["area"] == "masters"]
    assert code == 1 and "is a node, not a master" in row["found"]


def test_without_a_master_it_looks_at_the_machine_alone() -> None:
    _, rows = doctor()
    assert rows["masters and nodes"]["verdict"] == "not applicable"
    assert {
        "versions",
        "clock",
        "open files",
        "sealed memory",
        "/dev/shm",
        "locked memory",
        "RDMA",
        "NIXL",
        "GPU",
    } <= set(rows)


# ---------------------------------------------------------------- broken on purpose


def test_a_stopped_node_is_told_by_name_and_the_others_are_well(pool: TieredPool) -> None:
    pool.node(1).signal(signal.SIGSTOP)
    began = time.monotonic()
    code, rows = doctor("--master", pool.address)
    assert code == 1 and time.monotonic() - began < 40
    stopped, well = node_id(pool, 1), node_id(pool, 0)
    assert rows[f"{stopped}: tcp"]["verdict"] == "problem" and "silent" in rows[f"{stopped}: tcp"]["found"]
    assert rows[f"{stopped}: shm"]["verdict"] == "warning"
    assert rows[f"{well}: tcp"]["verdict"] == "ok" and rows[f"{well}: shm"]["verdict"] == "ok"


def test_a_killed_node_and_a_master_that_is_not_there(crippled: TieredPool) -> None:
    dead = node_id(crippled, 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    code, rows = doctor("--master", f"{nobody},{crippled.address}")
    assert code == 1
    assert rows[nobody]["verdict"] == "problem" and "refused" in rows[nobody]["found"]
    assert rows[f"{crippled.address}: channel"]["verdict"] == "ok"  # the dead one does not hide the living one
    assert rows[f"{dead}: tcp"]["verdict"] == "problem"
    assert rows[f"{node_id(crippled, 1)}: tcp"]["verdict"] == "ok"


def test_a_taken_port_names_its_holder() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, rows = doctor("--listen", f"{address},127.0.0.1:0")
        assert code == 1 and rows[address]["verdict"] == "problem"
        assert f"pid {os.getpid()}" in rows[address]["found"]
        assert rows["127.0.0.1:0"]["verdict"] == "ok"
    code, rows = doctor("--listen", address)
    assert rows[address]["verdict"] == "ok"


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    code, rows = doctor("--listen", "192.0.2.1:7400")
    assert code == 1 and "cannot be listened on" in rows["192.0.2.1:7400"]["found"]


def test_tiny_limits_are_warned_of() -> None:
    def tiny() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

    _, rows = doctor(limit=tiny)
    assert "64KiB" in rows["locked memory"]["found"]
    assert rows["open files"]["verdict"] == "warning" and "512" in rows["open files"]["found"]


def test_directories_that_cannot_be_a_device(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, rows = doctor("--ssd", str(tmp_path / "nowhere"), "--ssd", str(tmp_path / "file"))
    assert code == 1
    assert rows[str(tmp_path / "nowhere")]["found"] == "is not there"
    assert rows[str(tmp_path / "file")]["found"] == "is not a directory"


def test_a_device_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    rows = list(disk.look(tmp_path))
    assert "read at" in rows[0].found and rows[0].verdict in (Verdict.OK, Verdict.WARNING)
    assert rows[1].what.endswith("O_DIRECT")
    assert list(tmp_path.iterdir()) == []


def test_memory_is_no_ssd() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to write to")
    before = set(Path("/dev/shm").iterdir())
    rows = list(disk.look(Path("/dev/shm")))
    assert rows[0].verdict == Verdict.WARNING and "memory" in rows[0].advice
    assert set(Path("/dev/shm").iterdir()) <= before


def test_a_device_that_gives_back_other_bytes_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = disk.read_fully

    def turned(file: Any, into: memoryview, offset: int) -> None:
        real(file, into, offset)
        into[100] ^= 1

    monkeypatch.setattr(disk, "read_fully", turned)
    (row,) = disk.look(tmp_path)
    assert row.verdict == Verdict.PROBLEM and "other bytes" in row.found
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_address_is_a_wrong_flag() -> None:
    code, told = called("doctor", "--master", "nonsense")
    assert code == 2 and "is not HOST:PORT" in told


# ---------------------------------------------------------------- its parts


def test_a_check_that_breaks_or_hangs_does_not_stop_the_others() -> None:
    let_go = threading.Event()

    def breaks() -> list[Row]:
        raise RuntimeError("oh")

    def hangs() -> list[Row]:
        let_go.wait(60)
        return []

    well = Row("a", "well", Verdict.OK, "fine")
    began = time.monotonic()
    rows = run([Check("a", "breaks", breaks), Check("a", "hangs", hangs, 0.2), Check("a", "well", lambda: [well])])
    let_go.set()
    assert time.monotonic() - began < 5
    assert [row.verdict for row in rows] == [Verdict.PROBLEM, Verdict.PROBLEM, Verdict.OK]
    assert "oh" in rows[0].found and "0.2 s" in rows[1].found


@pytest.mark.parametrize(
    ("ahead", "verdict"), [(0.0, "ok"), (1.0, "ok"), (-1.0, "ok"), (90.0, "warning"), (-3700.0, "warning")]
)
def test_a_wall_clock_that_is_off_is_a_warning(ahead: float, verdict: str) -> None:
    now = 1_700_000_000.4
    date = email.utils.formatdate(int(now + ahead), usegmt=True)
    (row,) = reach.skew("nodes", "n", date, now - 0.01, now + 0.01)
    assert row.verdict == verdict, row
    if verdict == "warning":
        assert ("ahead" in row.found) == (ahead > 0)
    (unknown,) = reach.skew("nodes", "n", "yesterday", now, now)
    assert unknown.verdict == Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("address", "verdict"),
    [("10.0.0.1:1", "warning"), ("127.0.0.1:1", "not applicable"), ("unix:/x", "not applicable")],
)
def test_a_channel_that_asks_nobody_is_a_warning_where_others_reach_it(address: str, verdict: str) -> None:
    assert reach.who_may_call("nodes", "n", address, pb.HelloOk()).verdict == verdict


def test_other_versions_are_warned_of() -> None:
    (row,) = reach.same_version("nodes", "n", "kvstrata 0.0.9")
    assert row.verdict == Verdict.WARNING and "0.0.9" in row.found
    assert list(reach.same_version("nodes", "n", reach.SOFTWARE)) == []
    old = cluster.Roster([], {"n": control.NodeRow()}, [control.ClientRow(name="vllm", software="kvstrata 0.0.9")])
    (row,) = cluster.who_is_there(old)
    assert row.verdict == Verdict.WARNING and "vllm (kvstrata 0.0.9)" in row.found


def test_that_there_are_no_nodes_is_said_where_a_master_said_so() -> None:
    (row,) = cluster.who_is_there(cluster.Roster(told=True))
    assert row.verdict == Verdict.WARNING and "start storage nodes" in row.advice
    (row,) = cluster.who_is_there(cluster.Roster())
    assert row.verdict == Verdict.NOT_APPLICABLE and "start" not in row.advice


def test_memory_that_is_sealed_cannot_be_written() -> None:
    (row,) = machine.sealed_memory()
    assert row.verdict == Verdict.OK
    fd = os.memfd_create("kvstrata-test")
    os.ftruncate(fd, 4096)
    assert machine._writable(fd)
    os.close(fd)


def test_huge_pages_that_are_all_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "RESERVED", tmp_path)
    monkeypatch.setattr(huge_pages, "TRANSPARENT", tmp_path)
    (row,) = machine.huge_pages()
    assert row.verdict == Verdict.NOT_APPLICABLE
    (tmp_path / "shmem_enabled").write_text("always within_size [advise] never deny force\n")
    (row,) = machine.huge_pages()
    assert row.verdict == Verdict.OK and "transparent" in row.found
    (tmp_path / "nr_hugepages").write_text("512\n")
    (tmp_path / "free_hugepages").write_text("0\n")
    (row,) = machine.huge_pages()
    assert row.verdict == Verdict.WARNING and "0 of 512" in row.found


def test_who_listens_is_found_by_its_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert ports.listener(port) == 0
        taken.listen()
        assert ports.listener(port) == os.getpid()


# ---------------------------------------------------------------- node check


def check(pool: TieredPool, *arguments: str) -> tuple[int, dict[str, Any]]:
    code, told = called("node", "check", "--json", "--master", pool.address, *arguments)
    assert isinstance(told, list), told
    return code, {row["node_id"]: row for row in told}


def flip(folder: Path) -> int:
    """Turn a bit in the payload of each slot of a device that holds a block; how many."""
    data = bytearray((folder / "extents").read_bytes())
    turned = 0
    for start in range(4096, len(data) - SSD_SLOT, 4096):
        if data[start : start + 8] == b"kvsSlot\0":
            data[start + 4096 + 1000] ^= 4
            turned += 1
    with (folder / "extents").open("r+b") as file:
        file.write(data)
    return turned


def test_nodes_check_themselves_and_find_turned_bits(fresh: TieredPool) -> None:
    with Client(fresh.address) as client:
        tenant = Tenant(client, "acme", 60).stored()
        code, rows = check(fresh, "--scrub")
        assert code == 0 and set(rows) == {node_id(fresh, 0), node_id(fresh, 1)}
        assert sum(row["scrub"]["ssd"]["blocks"] for row in rows.values()) == 60
        assert all(row["healthy"] and row["complete"] for row in rows.values())
        full = next(name for name, row in rows.items() if row["scrub"]["ssd"]["blocks"])
        index = next(i for i in range(2) if node_id(fresh, i) == full)
        turned = flip(fresh.ssd_of(index))
        assert turned == rows[full]["scrub"]["ssd"]["blocks"]
        code, rows = check(fresh, full, "--scrub")
        assert code == 1 and set(rows) == {full}
        assert rows[full]["scrub"]["ssd"]["bad"] == turned and rows[full]["scrub"]["dram"]["bad"] == 0
        assert {bad["status"] for bad in rows[full]["bad"]} == {"corrupt"}
        assert tenant.load().loaded.all()  # memory still has them
        assert fresh.metrics(f"node{index}")["kvstrata_node_scrub_corrupt_total", ""] == turned
        code, rows = check(fresh, full, "--scrub")
        assert code == 0 and rows[full]["scrub"]["ssd"]["bad"] == 0


def test_a_node_that_cannot_be_asked_is_a_failure_and_the_others_are_checked(crippled: TieredPool) -> None:
    dead, well = node_id(crippled, 0), node_id(crippled, 1)
    code, rows = check(crippled)
    assert code == 1 and rows[well]["healthy"] and not rows[dead]["healthy"]
    assert rows[dead]["error"]  # cannot connect; or another process has its port by now, and knows nothing of checks
    code, told = called("node", "check", "--master", crippled.address)
    assert code == 1 and "not checked" in told and "sound" in told
    code, told = called("node", "check", "nobody", "--master", crippled.address)
    assert code == 2 and "no node nobody" in told and well in told


def test_checks_while_a_tenant_reads_and_stores(pool: TieredPool) -> None:
    with Client(pool.address) as client:
        tenant = Tenant(client, "busy", 64).stored()
        stop = threading.Event()
        loads: list[bool] = []

        def read() -> None:
            while not stop.is_set():
                loads.append(bool(tenant.load().loaded.all()))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(2):
                code, rows = check(pool, "--scrub", "--rate", "64MiB")
                assert code == 0, [row for row in rows.values() if row["verdict"] == "problem"]
            until(lambda: len(loads) > 3)
        finally:
            stop.set()
            reader.join(20)
        assert all(loads)

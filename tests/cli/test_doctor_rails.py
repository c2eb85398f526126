"""What the doctor says of one-sided transfers and GPUs: on machines made of files, and on real nodes over CMA."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.cli.doctor import gpu, rails
from kvstrata.cli.doctor.rows import Verdict
from kvstrata.transfer.rdma import nixl
from kvstrata.transfer.rdma.found import Places, cma_problem
from tests.cli.test_doctor import doctor, node_id
from tests.e2e.tiered_pool import TieredPool

NO_CAPABILITY = "CapEff:\t0000000000000000\n"
needs_cma = pytest.mark.skipif(
    not nixl.installed() or bool(cma_problem()), reason=f"no rails by cma here: {cma_problem() or nixl.ADVICE}"
)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A machine with one InfiniBand port that is up, and a process without capabilities."""
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "infiniband" / "mlx5_0" / "device").mkdir()
    (tmp_path / "infiniband" / "mlx5_0" / "device" / "numa_node").write_text("1\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    (tmp_path / "status").write_text(NO_CAPABILITY)
    return Places(tmp_path / "infiniband", tmp_path / "dev", tmp_path / "ptrace_scope", tmp_path / "status")


def none_there(tmp_path: Path) -> Places:
    (tmp_path / "status").write_text(NO_CAPABILITY)
    return Places(tmp_path / "nothing", tmp_path / "nothing", tmp_path / "nothing", tmp_path / "status")


# ---------------------------------------------------------------- this machine


def test_an_rdma_device_is_shown_with_its_link_and_numa_node(places: Places) -> None:
    (row,) = rails.rdma(places)
    assert row.verdict == Verdict.OK
    assert row.found == "mlx5_0:1 (InfiniBand, 400 Gb/sec (4X NDR), NUMA node 1)"


def test_a_device_that_is_down_or_not_given_to_the_container_is_a_warning(places: Places) -> None:
    (places.device_nodes / "uverbs0").unlink()
    (row,) = rails.rdma(places)
    assert row.verdict == Verdict.WARNING and "uverbs" in row.found
    (places.infiniband / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN\n")
    (row,) = rails.rdma(places)
    assert row.verdict == Verdict.WARNING and "no port of mlx5_0 is active" in row.found and row.advice


def test_a_machine_without_a_device_is_no_warning(tmp_path: Path) -> None:
    (row,) = rails.rdma(none_there(tmp_path))
    assert row.verdict == Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("limit", "dram", "verdict"),
    [
        (8 << 20, None, Verdict.PROBLEM),
        (8 << 20, 4 << 20, Verdict.OK),
        (2 << 30, 4 << 30, Verdict.PROBLEM),
        (2 << 30, 1 << 30, Verdict.OK),
        (resource.RLIM_INFINITY, 1 << 50, Verdict.OK),
    ],
)
def test_what_may_be_locked_is_held_against_what_is_to_be(
    places: Places, monkeypatch: pytest.MonkeyPatch, limit: int, dram: int | None, verdict: Verdict
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    (row,) = rails.locked_memory(dram, places)
    assert row.verdict == verdict, row
    assert bool(row.advice) == (verdict is not Verdict.OK)


def test_less_than_all_memory_may_be_locked(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rails, "memory_available", lambda: 64 << 30)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 30, 8 << 30))
    (row,) = rails.locked_memory(None, places)
    assert row.verdict == Verdict.WARNING and "--dram" in row.advice
    places.status.write_text(f"CapEff:\t{1 << 14:016x}\n")
    (row,) = rails.locked_memory(None, places)
    assert row.verdict == Verdict.OK and "CAP_IPC_LOCK" in row.found


def test_without_a_device_the_limit_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 << 10, 64 << 10))
    (row,) = rails.locked_memory(None, none_there(tmp_path))
    assert row.verdict == Verdict.OK and "64KiB" in row.found


def test_nixl_that_is_not_installed_matters_where_there_is_a_device(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "installed", lambda: "")
    (row,) = rails.nixl_here(places)
    assert row.verdict == Verdict.WARNING and "pip install" in row.advice
    (row,) = rails.nixl_here(none_there(tmp_path))
    assert row.verdict == Verdict.NOT_APPLICABLE and not row.advice


@needs_cma
def test_an_agent_is_really_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = rails.nixl_here()
    assert row.verdict == Verdict.OK and "UCX" in row.found
    monkeypatch.setenv("UCX_TLS", "nonsense")
    (row,) = rails.nixl_here()
    assert row.verdict in (Verdict.WARNING, Verdict.PROBLEM) and "could not be made" in row.found


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os.abort()", "ended with -6"),
        ("raise OSError('no such library')", "no such library"),
        ("import time; time.sleep(60)", "no answer within"),
    ],
)
def test_a_library_that_ends_or_hangs_takes_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch, code: str, told: str
) -> None:
    monkeypatch.setattr(nixl, "installed", lambda: "nixl_cu12")
    monkeypatch.setattr(rails, "_TRIES_NIXL", code)
    monkeypatch.setattr(rails, "CHILD_S", 3.0)
    (row,) = rails.nixl_here()
    assert row.verdict in (Verdict.WARNING, Verdict.PROBLEM) and told in row.found


# ---------------------------------------------------------------- GPUs


def test_gpu_memory_is_reached_by_a_module_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in (("_GPUS", "gpus/0000:01:00.0"), ("_INFINIBAND", "infiniband/mlx5_0")):
        (tmp_path / folder).mkdir(parents=True)
        monkeypatch.setattr(gpu, name, (tmp_path / folder).parent)
    monkeypatch.setattr(gpu, "_PEERMEM", tmp_path / "nvidia_peermem")
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path / "version")
    (row,) = gpu.reached_by_rdma()
    assert row.verdict == Verdict.WARNING and "nvidia-peermem" in row.advice
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1\n")
    monkeypatch.setattr(gpu, "linux", lambda: (5, 10))
    (row,) = gpu.reached_by_rdma()
    assert row.verdict == Verdict.WARNING
    monkeypatch.setattr(gpu, "linux", lambda: (6, 8))
    (row,) = gpu.reached_by_rdma()
    assert row.verdict == Verdict.OK and "dma-buf" in row.found
    (tmp_path / "nvidia_peermem").mkdir()
    (row,) = gpu.reached_by_rdma()
    assert row.verdict == Verdict.OK and "nvidia-peermem is loaded" in row.found


def test_a_machine_without_gpus_is_told_at_once() -> None:
    if gpu.devices() or any(file.exists() for file in gpu._DEVICE_FILES):
        pytest.skip("this machine has a GPU")
    (row,) = gpu.gpus()
    assert row.verdict == Verdict.NOT_APPLICABLE and "no device" in row.found


def test_gpus_are_counted_by_cupy_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(gpu, "_GPUS", tmp_path)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: object())
    both = 'import json; print(json.dumps({"cupy": ["13.4.0", 8], "torch": ["2.9.0", 8]}))'
    monkeypatch.setattr(gpu, "_COUNTS", both)
    (row,) = gpu.gpus()
    assert row.verdict == Verdict.OK and row.found == "cupy 13.4.0: 8 devices, torch 2.9.0: 8 devices"
    torch = """import json; print(json.dumps({"cupy": "No module named 'cupy'", "torch": ["2.9.0", 8]}))"""
    monkeypatch.setattr(gpu, "_COUNTS", torch)
    (row,) = gpu.gpus()
    assert row.verdict == Verdict.WARNING and "cupy not installed" in row.found and "kvstrata[gpu]" in row.advice
    monkeypatch.setattr(gpu, "_COUNTS", "import os; os.abort()")
    (row,) = gpu.gpus()
    assert row.verdict == Verdict.WARNING and "could not be counted" in row.found


# ---------------------------------------------------------------- real nodes


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[TieredPool]:
    one = TieredPool(tmp_path, nodes=2, more=("--rdma", "cma"))
    yield one
    for daemon in one.daemons.values():
        if daemon.process.poll() is None:
            daemon.process.send_signal(signal.SIGCONT)
    one.end()


@needs_cma
def test_nodes_are_reached_over_their_rails_and_tested(pool: TieredPool) -> None:
    code, rows = doctor("--master", pool.address, "--round-trip", own_process=True)
    assert code == 0, [row for row in rows.values() if row["verdict"] == "problem"]
    for index in range(2):
        row = rows[f"{node_id(pool, index)}: rdma"]
        assert row["verdict"] == "ok" and "self-test passed both ways" in row["found"], row
        assert rows[f"{node_id(pool, index)}: round trip by rdma"]["verdict"] == "ok"


@needs_cma
def test_rails_that_cannot_be_opened_are_a_problem_and_tcp_is_well(
    pool: TieredPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "nonsense")  # of the doctor's process alone
    code, rows = doctor("--master", pool.address, own_process=True)
    row = rows[f"{node_id(pool, 0)}: rdma"]
    assert code == 1 and row["verdict"] == "problem" and "tcp meanwhile" in row["advice"], row
    assert rows[f"{node_id(pool, 0)}: tcp"]["verdict"] == "ok"


def test_a_node_without_rails_says_why(tmp_path: Path) -> None:
    one = TieredPool(tmp_path, nodes=1, more=("--rdma", "off"))
    try:
        _, rows = doctor("--master", one.address, own_process=True)
        row = rows[f"{node_id(one, 0)}: rdma"]
        assert row["verdict"] == "not applicable" and "off" in row["found"], row
    finally:
        one.end()

"""Daemons as a user starts them: ready lines, clean ends, ports in use, nothing left behind."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FREE = "127.0.0.1:0"
Start = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command, wait for its ready line; whatever is left is killed by pid."""
    children: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        command = [sys.executable, "-m", "kvstrata.cli.app", *arguments, "--log-format", "json"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        children.append(child)
        assert child.stdout is not None
        assert select.select([child.stdout], [], [], 30)[0], "no ready line in time"
        return child, json.loads(child.stdout.readline())

    yield begin
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait(10)
        if child.stdout is not None:
            child.stdout.close()


def master(start: Start, tmp_path: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    state = str(tmp_path / "m.db")
    return start("master", "--listen", FREE, "--grpc", FREE, "--http", FREE, "--state", state)


def test_a_master_says_where_it_is_and_ends_when_told(start: Start, tmp_path: Path) -> None:
    child, ready = master(start, tmp_path)
    assert (ready["event"], ready["role"], ready["pid"]) == ("ready", "master", child.pid)
    for name in ("channel", "grpc", "http"):
        host, _, port = ready[name].rpartition(":")
        socket.create_connection((host, int(port)), 5).close()
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 0


def test_a_node_serves_and_ends_when_told(start: Start, tmp_path: Path) -> None:
    _, above = master(start, tmp_path)
    where = ["--master", above["channel"], "--listen", FREE, "--http", FREE]
    child, ready = start("storage", *where, "--data", str(tmp_path / "n"), "--dram", "16MiB")
    assert (ready["role"], ready["pid"]) == ("node", child.pid)
    assert Path(ready["unix"]).is_socket()
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == 0
    assert not Path(ready["unix"]).exists()


@pytest.mark.parametrize("flag", ["--listen", "--grpc", "--http"])
def test_a_port_in_use_is_said_and_ends_with_2(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--listen": FREE, "--grpc": FREE, "--http": FREE, flag: f"127.0.0.1:{taken.getsockname()[1]}"}
        arguments = [part for pair in ports.items() for part in pair]
        done = subprocess.run(
            [sys.executable, "-m", "kvstrata.cli.app", "master", *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 2 and "in use" in done.stderr and "Traceback" not in done.stderr


def test_dev_is_a_whole_pool_and_leaves_nothing_behind(start: Start, tmp_path: Path) -> None:
    shm = set(Path("/dev/shm").iterdir())
    data = tmp_path / "data"
    child, ready = start("dev", "--nodes", "2", "--dram", "16MiB", "--port-base", "0", "--data", str(data))
    pids = [ready["master_pid"], *(node["pid"] for node in ready["nodes"])]
    assert len(pids) == 3 and all(_alive(pid) for pid in pids)
    health = [sys.executable, "-m", "kvstrata.cli.app", "health", "--master", ready["master"], "--json"]
    _until(lambda: len(_active(health)) == 2)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 0
    _until(lambda: not any(_alive(pid) for pid in pids))
    assert set(Path("/dev/shm").iterdir()) <= shm


def test_children_of_a_killed_dev_die_with_it(start: Start, tmp_path: Path) -> None:
    child, ready = start("dev", "--nodes", "1", "--dram", "16MiB", "--port-base", "0", "--data", str(tmp_path / "d"))
    pids = [ready["master_pid"], *(node["pid"] for node in ready["nodes"])]
    child.kill()
    _until(lambda: not any(_alive(pid) for pid in pids), 20)


def _active(health: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run(health, capture_output=True, text=True, timeout=30, check=False)
    return [node for node in json.loads(done.stdout)["nodes"] if node["state"] == "active" and node["synced"]]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _until(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)

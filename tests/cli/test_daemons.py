"""Daemons as a user starts them: ready lines, clean ends, ports in use, nothing left behind."""

from __future__ import annotations

import json
import os
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

from kvstrata.cli.as_json import rows
from kvstrata.client.admin import AdminClient
from kvstrata.proto.errors import Unavailable
from tests import command_line
from tests.processes import alive

FREE = "127.0.0.1:0"
Start = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command, wait for its ready line; whatever is left at the end is told to go, then killed, by pid."""
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
        child.terminate()
    for child in children:
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
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


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstrata.cli.app", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def dev(start: Start, nodes: int, *more: str) -> tuple[subprocess.Popen[str], dict[str, Any], list[int]]:
    """A running ``kvstrata dev`` on free ports whose nodes the master has, its ready line, its daemons' pids."""
    child, ready = start("dev", "--nodes", str(nodes), "--dram", "16MiB", "--port-base", "0", *more)
    _until(lambda: len(_active(ready["master"])) == nodes)
    return child, ready, [ready["master_pid"], *(node["pid"] for node in ready["nodes"])]


def test_dev_is_a_whole_pool_and_leaves_nothing_behind(start: Start, tmp_path: Path) -> None:
    shm = set(Path("/dev/shm").iterdir())
    child, _, pids = dev(start, 2, "--data", str(tmp_path / "data"))
    assert len(set(pids)) == 3 and all(alive(pid) for pid in pids)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 0
    assert not any(alive(pid) for pid in pids)
    assert set(Path("/dev/shm").iterdir()) <= shm


def test_the_pool_is_looked_at_and_measured(start: Start) -> None:
    _, ready, _ = dev(start, 2)
    said = cli("health", "--master", ready["master"])
    assert said.returncode == 0 and "healthy" in said.stdout and "2 of 2 nodes" in said.stdout
    listed = json.loads(command_line.run("node", "list", "--master", ready["master"], "--json").stdout)
    assert {node["node_id"] for node in listed} == {node["node_id"] for node in ready["nodes"]}
    for transport in ("shm", "tcp"):
        size = ("--size", "4KiB", "--blocks", "8", "--calls", "2", "--rounds", "2", "--transport", transport)
        measured = command_line.run("bench", "--master", ready["master"], *size, "--json")
        assert measured.returncode == 0, measured.stderr
        figures = {figure["op"]: figure for figure in json.loads(measured.stdout)}
        assert set(figures) == {"store", "load", "lookup"}
        assert all(figure["missed"] == 0 and figure["p50_us"] > 0 for figure in figures.values())
    assert sum(node["blocks"] for node in _nodes(ready["master"])) == 0, "bench removes what it stored"


def test_the_temporary_home_of_a_dev_goes_with_it(start: Start) -> None:
    child, ready, _ = dev(start, 1)
    home = Path(ready["nodes"][0]["unix"]).parents[1]
    assert home.is_dir()
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0 and not home.exists()


def test_a_dead_node_is_reported_and_dev_goes_on(start: Start, tmp_path: Path) -> None:
    child, ready, pids = dev(start, 2)
    os.kill(pids[1], signal.SIGKILL)
    _until(lambda: len(_active(ready["master"])) == 1)
    assert child.poll() is None and alive(pids[2])


def test_dev_starts_what_died_again_where_it_was(start: Start, tmp_path: Path) -> None:
    child, ready, pids = dev(start, 1, "--restart")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _until(lambda: [node["node_id"] for node in _active(ready["master"])] == [ready["nodes"][0]["node_id"]], 30)
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0


def test_dev_says_which_daemon_could_not_start_and_ends_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli("dev", "--nodes", "1", "--dram", "16MiB", "--port-base", str(min(port, 60000)))
    refused = cli("dev", "--nodes", "1", "--dram", "1MiB", "--port-base", "0")
    assert refused.returncode == 2 and "node-0 did not start" in refused.stderr and "at least" in refused.stderr
    if port <= 60000:
        assert done.returncode == 2 and "master did not start" in done.stderr and "in use" in done.stderr


def test_children_of_a_killed_dev_die_with_it(start: Start, tmp_path: Path) -> None:
    child, ready = start("dev", "--nodes", "1", "--dram", "16MiB", "--port-base", "0", "--data", str(tmp_path / "d"))
    pids = [ready["master_pid"], *(node["pid"] for node in ready["nodes"])]
    child.kill()
    _until(lambda: not any(alive(pid) for pid in pids), 20)


def _nodes(master: str) -> list[dict[str, Any]]:
    """What the master says now; nothing while it is away."""
    try:
        with AdminClient(master, timeout_s=2.0) as admin:
            return rows(admin.nodes())
    except Unavailable:
        return []


def _active(master: str) -> list[dict[str, Any]]:
    return [node for node in _nodes(master) if node["state"] == "active" and node["synced"]]


def _until(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def test_a_node_with_a_key_for_its_ssd(start: Start, tmp_path: Path) -> None:
    key, data = tmp_path / "key", ["--data", str(tmp_path / "node"), "--ssd", f"{tmp_path / 'ssd'}=16MiB"]
    key.touch(0o600)
    key.write_text("5a" * 32)
    node = ["storage", "--master", "127.0.0.1:1", "--listen", FREE, "--http", FREE, "--dram", "8MiB", *data]
    child, ready = start(*node, "--ssd-key-file", str(key))
    assert ready["ssd_encrypted"] is True
    child.kill()
    child.wait(10)

    command = [sys.executable, "-m", "kvstrata.cli.app", *node]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "give --ssd-key-file as before" in " ".join(done.stderr.split())

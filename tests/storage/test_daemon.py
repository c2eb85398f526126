"""A node as a process: start, serve, stop, restart, and what a kill leaves behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ConfigError
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.eviction.quotas import NodeShare
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.base import Endpoint, Fetch, Push
from kvstrata.transfer.frames import FrameStream
from kvstrata.transfer.identity import Identity, boot_id, parse_address
from kvstrata.transfer.regions import Region
from kvstrata.transfer.shm import ShmTransport
from kvstrata.transfer.tcp import TcpTransport
from kvstrata.transfer.web import WebServer
from tests.waiting import until

from .conftest import keys

NAMESPACE = Namespace("model", 4096, 16)

DAEMON = """
import json, sys
from pathlib import Path
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ConfigError
from kvstrata.storage.daemon import StorageConfig, run
masters = tuple(m for m in sys.argv[2].split(",") if m)
config = StorageConfig(masters, sys.argv[3], "127.0.0.1:0", Path(sys.argv[1]), 16 << 20)
try:
    raise SystemExit(run(config, lambda line: print(json.dumps(line), flush=True)))
except ConfigError as error:
    raise SystemExit(f"refused: {error}")
"""

Ready = dict[str, Any]
Started = tuple[subprocess.Popen[str], Ready]


def ready_line(process: subprocess.Popen[str]) -> Ready:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], 20)
    assert readable, "no ready line"
    return dict(json.loads(process.stdout.readline()))


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(data: Path, masters: str = "", listen: str = "127.0.0.1:0") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", DAEMON, str(data), masters, listen]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def endpoint(ready: Ready) -> Endpoint:
    return Endpoint(ready["node_id"], ready["incarnation"], ready["channel"], ready["unix"], boot_id())


def stored(ready: Ready) -> list[int]:
    peer = ShmTransport(Identity.new()).connect(endpoint(ready))
    region = Region(np.arange(10 * 4096, dtype=np.uint8), None)
    request = Push(NAMESPACE, "", keys(range(10)), region.rows(NAMESPACE), time.monotonic() + 5)
    status = peer.push(request).status.tolist()
    peer.close()
    return [int(each) for each in status]


def fetched(ready: Ready) -> list[int]:
    peer = TcpTransport(Identity.new()).connect(endpoint(ready))
    region = Region(np.zeros(10 * 4096, np.uint8), None)
    request = Fetch(NAMESPACE, "", keys(range(10)), region.rows(NAMESPACE), time.monotonic() + 5)
    status = peer.fetch(request).status.tolist()
    peer.close()
    return [int(each) for each in status]


def get(ready: Ready, path: str) -> tuple[int, str]:
    with urllib.request.urlopen(f"http://{ready['http']}{path}", timeout=5) as answer:
        return answer.status, answer.read().decode()


def test_start_serve_stop_start_again(tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    first = spawn(tmp_path / "node")
    before = ready_line(first)
    assert before["event"] == "ready" and before["role"] == "node" and before["pid"] == first.pid
    assert stored(before) == [BlockStatus.STORED] * 10
    assert fetched(before) == [BlockStatus.LOADED] * 10
    first.send_signal(signal.SIGTERM)
    assert first.wait(5) == 0
    assert not Path(before["unix"]).exists()
    after = ready_line(spawn(tmp_path / "node", listen=before["channel"]))
    assert after["node_id"] == before["node_id"] and after["incarnation"] > before["incarnation"]
    assert after["channel"] == before["channel"], "the port is free again at once"
    assert fetched(after) == [BlockStatus.MISSING] * 10
    assert fetched(before) == [BlockStatus.NODE_LOST] * 10, "who means the old incarnation is told so"


def test_one_directory_two_nodes(tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    first = spawn(tmp_path)
    ready = ready_line(first)
    second = spawn(tmp_path)
    _, errors = second.communicate(timeout=20)
    assert second.returncode == 1 and f"in use by process {first.pid}" in errors
    assert stored(ready) == [BlockStatus.STORED] * 10, "the first one is untouched"


def test_a_kill_leaves_nothing_in_shared_memory(tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    """FAULTS "seen in peers" 13. The next start needs no cleaning up either."""
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208  names are all that matters
    first = spawn(tmp_path, masters="127.0.0.1:1")
    ready = ready_line(first)
    stored(ready)
    sidecars = children(first.pid)
    assert len(sidecars) == 1
    first.kill()
    first.wait()
    assert set(os.listdir("/dev/shm")) <= before  # noqa: PTH208
    until(lambda: over(sidecars[0]))
    again = ready_line(spawn(tmp_path))
    assert again["incarnation"] > ready["incarnation"]
    assert stored(again) == [BlockStatus.STORED] * 10


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def over(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_it_serves_and_stops_without_its_masters(tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    process = spawn(tmp_path, masters="127.0.0.1:1,127.0.0.1:2")
    ready = ready_line(process)
    assert stored(ready) == [BlockStatus.STORED] * 10
    _, body = get(ready, "/healthz")
    health = json.loads(body)
    assert health["healthy"] and [master["attached"] for master in health["masters"]] == [False, False]
    stopping = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    assert time.monotonic() - stopping < 5.0


def test_garbage_on_every_port(tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    ready = ready_line(spawn(tmp_path))
    for address in (ready["channel"], ready["http"]):
        host, port = address.split(":")
        for junk in (os.urandom(100_000), b"\0" * 100_000, b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=5) as sock:
                sock.settimeout(5)
                try:
                    sock.sendall(junk)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
                except ConnectionError:
                    continue
    assert stored(ready) == [BlockStatus.STORED] * 10
    assert get(ready, "/readyz")[0] == 200


# ---------------------------------------------------------------- HTTP, in this process


def test_metrics_have_one_denominator(running: StorageNode) -> None:
    ready = {
        "http": running.http,
        **running.report.health(),
        "channel": running.channel,
        "unix": str(running.unix_path),
    }
    stored(ready)
    fetched(ready)
    stored(ready)
    _, text = get(ready, "/metrics")
    values = {name: float(value) for name, value in re.findall(r"^(kvstrata\S+) (\S+)$", text, re.M)}
    assert values['kvstrata_node_read_blocks_total{outcome="hit_dram"}'] == 10
    assert values['kvstrata_node_write_blocks_total{outcome="stored"}'] == 10
    assert values['kvstrata_node_write_blocks_total{outcome="already_present"}'] == 10
    assert values["kvstrata_node_blocks"] == 10
    assert values["kvstrata_node_dram_bytes_used"] == 10 * 4096
    assert values["kvstrata_node_dram_bytes"] == 8 << 20
    assert values['kvstrata_node_slots{slot_bytes="4096",state="taken"}'] == 10


def test_tenants_are_asked_for_by_name_or_all(running: StorageNode) -> None:
    ready = {"http": running.http, "channel": running.channel, "unix": str(running.unix_path)}
    ready |= running.report.health()
    stored(ready)
    share = NodeShare("other", dram_limit=1 << 20, dram_floor=4096)
    with running.lock:
        running.state.quotas.apply([share], (), False, None, 0.0, time.monotonic())
    everyone = json.loads(get(ready, "/tenants")[1])["tenants"]
    assert everyone == [{"salt": "", "dram_bytes": 10 * 4096, "dram_limit": None, "dram_floor": 0}]
    named = json.loads(get(ready, "/tenants?salt=other&salt=")[1])["tenants"]
    assert named == [{"salt": "other", "dram_bytes": 0, "dram_limit": 1 << 20, "dram_floor": 4096}, *everyone]


def test_health_names_what_is_wrong(running: StorageNode) -> None:
    ready = {"http": running.http}
    status, body = get(ready, "/healthz")
    health = json.loads(body)
    assert status == 200 and health["problems"] == [] and health["dram_bytes"] == 8 << 20
    assert health["slots"] == [] and health["slabs"] == health["slabs_free"] == 8

    def broken() -> None:
        raise RuntimeError("out of luck")

    loop = next(loop for loop in running.loops._loops if loop.name == "deadlines")
    loop._turn = broken
    until(lambda: bool(running.report.problems()))
    with pytest.raises(urllib.error.HTTPError) as answer:
        get(ready, "/healthz")
    with answer.value as error:
        assert error.code == 503
        assert json.loads(error.read())["problems"] == ["deadlines: RuntimeError: out of luck"]


def test_versions_that_are_not_spoken_are_refused_by_name_and_counted(running: StorageNode) -> None:
    hello = Identity.new().hello()
    hello.protocol, hello.protocol_min, hello.software = 9, 9, "kvstrata 9"
    stream = FrameStream(socket.create_connection(parse_address(running.channel)[1]), 5.0)
    stream.send(Kind.HELLO, 1, hello.SerializeToString())
    failure = pb.Failure.FromString(stream.receive(time.monotonic() + 5).message)
    stream.close()
    assert failure.code == "VersionMismatch" and "upgrade the older one" in failure.message
    ready = {"http": running.http}
    assert json.loads(get(ready, "/healthz")[1])["refused_versions"] == {"kvstrata 9": 1}
    assert 'kvstrata_node_refused_versions_total{software="kvstrata 9"} 1.0' in get(ready, "/metrics")[1]


def test_ports_in_use_are_said_and_everything_is_given_back(tmp_path: Path, running: StorageNode) -> None:
    for listen, http in ((running.channel, "127.0.0.1:0"), ("127.0.0.1:0", running.http)):
        config = StorageConfig((), listen, http, tmp_path / "other", 4 << 20)
        with pytest.raises(ConfigError, match="in use"):
            StorageNode(config).start()
    again = StorageNode(StorageConfig((), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "other", 4 << 20))
    again.start()
    again.stop()
    again.stop()


@pytest.mark.parametrize("temporary", ["usual", "long"])
def test_a_long_data_path_gets_a_short_socket_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str
) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    if temporary == "long":
        (tmp_path / ("t" * 90)).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 90)))
    node = StorageNode(StorageConfig((), "127.0.0.1:0", "127.0.0.1:0", deep, 4 << 20))
    ready = node.start()
    assert len(ready["unix"]) < 100
    assert stored(ready) == [BlockStatus.STORED] * 10
    node.stop()
    assert not Path(ready["unix"]).parent.exists()


def test_a_web_server_stops_in_time_with_a_request_in_progress() -> None:
    """A reader that never finishes must not hold a stop up."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

    web = WebServer(app, "127.0.0.1:0").start()
    host, port = web.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(10)
        started = time.monotonic()
        web.stop(2.0)
        assert time.monotonic() - started < 4.0
    assert web.problem() == ""

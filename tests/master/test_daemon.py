"""The master as a process: start, stop, kill, restart, a port in use, a disk that refuses."""

from __future__ import annotations

import os
import resource
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstrata.master.daemon import Master, MasterConfig
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ConfigError
from kvstrata.proto.wire import Kind

Make = Callable[..., Any]


def test_starts_says_where_and_stops_in_time(wires: Any, closing: Make) -> None:
    process = closing(wires.process())
    ready = process.ready
    assert (ready["event"], ready["role"], ready["pid"]) == ("ready", "master", process.process.pid)
    assert all(not ready[name].endswith(":0") for name in ("channel", "grpc", "http"))
    node = closing(wires.node(ready["grpc"], "a")).attach()
    client = closing(wires.client(ready["channel"]))
    assert client.lookup(bytes(16)).hit_blocks == 0
    began = time.monotonic()
    assert process.terminate() == 0
    assert time.monotonic() - began < 5.0
    assert node.ended().details() == "the master stops"


def rostered(state: Path) -> int:
    """Nodes in the durable roster, as another process reads it."""
    reader = sqlite3.connect(f"file:{state}?mode=ro", uri=True)
    try:
        return int(reader.execute("SELECT COUNT(*) FROM nodes").fetchone()[0])
    finally:
        reader.close()


def test_killed_and_restarted_it_finds_all_blocks_again(
    wires: Any, closing: Make, tmp_path: Path, eventually: Make
) -> None:
    state = tmp_path / "state.db"
    first = closing(wires.process(state))
    nodes = [closing(wires.node(first.ready["grpc"], name)) for name in ("a", "b")]
    for node in nodes:
        node.blocks = os.urandom(16 * 1000)
        node.attach()
    everything = b"".join(node.blocks for node in nodes)
    assert closing(wires.client(first.ready["channel"])).lookup(everything).hit_blocks == 2000
    eventually(lambda: rostered(state) == 2)
    first.kill()

    second = closing(wires.process(state))
    assert second.ready["cluster_id"] == first.ready["cluster_id"]
    client = closing(wires.client(second.ready["channel"]))
    assert client.lookup(everything).not_yet, "the roster says that two nodes may still come"
    ready_url = f"http://{second.ready['http']}/readyz"
    assert httpx.get(ready_url).status_code == 503
    for old in nodes:
        again = closing(wires.node(second.ready["grpc"], old.node_id))
        again.blocks = old.blocks
        again.attach()
    answer = client.lookup(everything)
    assert (answer.hit_blocks, answer.not_yet) == (2000, False)
    assert not client.lookup(bytes(16)).not_yet
    assert httpx.get(ready_url).status_code == 200


def test_a_removal_outlives_the_master_for_a_node_that_was_away(wires: Any, closing: Make, tmp_path: Path) -> None:
    first = closing(wires.process(tmp_path / "s"))
    node = closing(wires.node(first.ready["grpc"], "a"))
    node.blocks = os.urandom(32)
    node.obeys = False
    node.attach()
    client = closing(wires.client(first.ready["channel"]))
    request = pb.Remove(ns=client.open(), salt="", hashes=node.blocks[:16], deadline_ms=50)
    assert client.ask(Kind.REMOVE, request, pb.RemoveOk, Kind.REMOVE_OK).unreached == ["a"]
    first.kill()
    second = closing(wires.process(tmp_path / "s"))
    again = closing(wires.node(second.ready["grpc"], "a"))
    again.blocks = node.blocks
    again.attach()
    assert again.removed == [node.blocks[:16]]


@pytest.mark.parametrize("which", ["listen", "grpc", "http"])
def test_a_port_in_use_is_a_clear_error_and_nothing_stays_open(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        addresses = {"listen": "127.0.0.1:0", "grpc": "127.0.0.1:0", "http": "127.0.0.1:0", which: taken}
        with pytest.raises(ConfigError, match=taken):
            Master(MasterConfig(**addresses, state=None))  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", int(taken.split(":")[1]))):
        pass


def test_two_masters_cannot_share_a_grpc_port(master: Master) -> None:
    with pytest.raises(ConfigError, match="for gRPC"):
        Master(MasterConfig("127.0.0.1:0", master.endpoints.grpc, "127.0.0.1:0", None))


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit")
def test_a_store_that_refuses_is_in_health_and_the_master_lives_on(
    wires: Any, closing: Make, tmp_path: Path, eventually: Make
) -> None:
    process = closing(wires.process(tmp_path / "s"))
    pid, url = process.ready["pid"], f"http://{process.ready['http']}/healthz"
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    node = closing(wires.node(process.ready["grpc"], "a"))
    node.blocks = os.urandom(32)
    node.attach()
    assert closing(wires.client(process.ready["channel"])).lookup(node.blocks).hit_blocks == 2
    eventually(lambda: httpx.get(url).status_code == 503)
    health = httpx.get(url)
    assert "state store" in health.json()["problems"][0]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
    eventually(lambda: httpx.get(url).status_code == 200)


def test_a_dead_loop_shows_in_health(master: Master, eventually: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(master.hub, "handle", lambda event: fails())
    url = f"http://{master.endpoints.http}/healthz"
    eventually(lambda: httpx.get(url).status_code == 503)
    assert "tick: RuntimeError: out of luck" in httpx.get(url).json()["problems"]


def test_a_stop_is_safe_twice_and_closes_the_ports(master: Master) -> None:
    master.stop()
    master.stop()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{master.endpoints.http}/healthz", timeout=1)

"""Several masters on one real Redis, each by a proxy of its own, and nodes of all of them."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from kvstrata.proto.errors import KVError, Unavailable
from tests.chaos.proxy import Proxy
from tests.e2e.real_pool import ANY, Daemon, keys, payload
from tests.redis_server import RedisServer
from tests.waiting import until

SIZE = 4096
COUNT = 64
SLOW = {"loaded", "node_lost", "late"}


class ManyMasters:
    """Daemons by name: ``master0`` and so on, ``node0`` and so on; a master that starts again has its old addresses."""

    def __init__(self, base: Path, masters: int = 3, nodes: int = 2) -> None:
        self._base = base
        self.daemons: dict[str, Daemon] = {}
        self._ended: list[Daemon] = []
        self.ways: dict[str, Proxy] = {}
        self.redis = RedisServer(base / "redis", "appendonly yes", "appendfsync always")
        try:
            self.names = [f"master{index}" for index in range(masters)]
            for name in self.names:
                self.ways[name] = Proxy(self.redis.address)
                self.start_master(name)
            self.channels = {name: str(self.daemons[name].ready["channel"]) for name in self.names}
            for index in range(nodes):
                self.daemons[f"node{index}"] = Daemon(
                    "storage", "--master", self.masters, "--listen", ANY, "--http", ANY,
                    "--data", str(base / f"node{index}"), "--dram", "32MiB",
                    log=base / f"node{index}.log",
                )  # fmt: skip
            for name in self.names:
                until(lambda name=name: self.nodes_of(name) == nodes, 30)  # type: ignore[misc]
        except BaseException:
            self.close()
            raise

    def start_master(self, name: str) -> None:
        before = self.daemons.get(name)
        facts = before.ready if before is not None else {}
        if before is not None:
            self._ended.append(before)
        self.daemons[name] = Daemon(
            "master", "--listen", str(facts.get("channel", ANY)), "--grpc", str(facts.get("grpc", ANY)),
            "--http", str(facts.get("http", ANY)), "--state", f"redis://{self.ways[name].address}/0",
            log=self._base / f"{name}.log",
        )  # fmt: skip
        assert self.daemons[name].ready

    @property
    def masters(self) -> str:
        return ",".join(self.channels.values())

    def nodes_of(self, name: str) -> int:
        """-1: it does not answer, as a master on a busy machine may not for a second."""
        try:
            with AdminClient(self.channels[name]) as admin:
                return sum(row.state == "active" and row.synced for row in admin.nodes())
        except Unavailable:
            return -1

    def health(self, name: str) -> dict[str, Any]:
        """What a daemon says of itself, well or not."""
        url = f"http://{self.daemons[name].ready['http']}/healthz"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))
        except http.client.HTTPException as error:  # it died while it answered
            raise ConnectionError(f"{name} broke off: {error}") from error

    def leaders(self) -> list[str]:
        """Masters that lead, of those that answer."""
        leading = []
        for name in self.names:
            try:
                if self.health(name)["leading"]:
                    leading.append(name)
            except OSError:
                continue
        return leading

    def leader(self, besides: str = "", seconds: float = 5.0) -> str:
        """The one that leads within ``seconds``, another than ``besides``."""
        found: list[str] = []

        def led() -> bool:
            found[:] = [name for name in self.leaders() if name != besides]
            return len(found) == 1

        until(led, seconds)
        return found[0]

    def close(self) -> None:
        for daemon in (*self.daemons.values(), *self._ended):
            daemon.end()
        for way in self.ways.values():
            way.close()
        self.redis.kill()


class Reader:
    """Looks blocks up and loads them, again and again, from its own thread: no call may fail, no byte be wrong.

    ``missed``: rounds in which a node that a busy machine kept waiting for 250 ms was taken for lost.
    """

    def __init__(self, masters: str, salt: str = "t") -> None:
        self.rounds = 0
        self.longest_s = 0.0
        self.missed = 0
        self.wrong: list[str] = []
        self.client = Client(masters, verify="always")
        self.ns = self.client.namespace("masters", block_bytes=SIZE, block_tokens=16)
        self.salt = salt
        self.hashes = keys(COUNT, "masters")
        self.data = payload(self.hashes, salt, SIZE)
        source = self.client.register(self.data.copy()).rows(self.ns)
        there = {"stored", "already_present"}
        until(lambda: set(self.client.store(self.ns, salt, self.hashes, source).reasons) <= there)
        until(lambda: self.client.lookup(self.ns, salt, self.hashes).hit_blocks == COUNT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Reader:
        self._thread.start()
        return self

    def _run(self) -> None:
        into = np.zeros_like(self.data)
        target = self.client.register(into).rows(self.ns)
        while not self._stop.is_set():
            began = time.monotonic()
            into[:] = 0
            try:
                got = self.client.load(self.ns, self.salt, self.hashes, target)
                if not (into[got.loaded] == self.data[got.loaded]).all() or set(got.reasons) - SLOW:
                    self.wrong.append(f"round {self.rounds}: {got.reasons}")
                self.missed += not got.loaded.all()
            except KVError as error:
                self.wrong.append(f"round {self.rounds}: {type(error).__name__}: {error}")
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.rounds += 1
            self._stop.wait(0.02)

    def more(self, rounds: int = 10) -> None:
        """Wait until it has gone round so often again."""
        wanted = self.rounds + rounds
        until(lambda: self.rounds >= wanted)

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)
        self.client.close()

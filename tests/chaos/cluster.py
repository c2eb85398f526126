"""A pool of real processes to hurt: masters, nodes and players, each on a host of its own where that is possible.

Any of them is killed, stopped, started again or cut off by name (``master0``, ``node2``, ``player1``), and
whatever a test did, :meth:`Cluster.close` leaves no process, no namespace and no file behind.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstrata.client.admin import AdminClient
from kvstrata.proto.errors import KVError
from tests.chaos.hosts import Host, Hosts
from tests.e2e.real_pool import Daemon
from tests.waiting import until

ROOT = Path(__file__).parents[2]
START_S = 60.0
END_S = 15.0


@dataclass(slots=True)
class Request:
    """One line of a player's trace."""

    began: float
    seconds: float
    touched: frozenset[str]
    counts: dict[str, int]
    error: str = ""

    @classmethod
    def parse(cls, line: str) -> Request:
        row = json.loads(line)
        touched = frozenset(row.pop("touched"))
        return cls(row.pop("began"), row.pop("seconds"), touched, error=row.pop("error", ""), counts=row)


@dataclass(slots=True)
class Traces:
    """What all players did."""

    requests: list[Request] = field(default_factory=list)

    def total(self, name: str) -> int:
        return sum(request.counts.get(name, 0) for request in self.requests)

    def errors(self) -> list[str]:
        return [request.error for request in self.requests if request.error]

    def longest_s(self) -> float:
        return max((request.seconds for request in self.requests), default=0.0)


class PlacedDaemon(Daemon):
    """A daemon that runs on a host, if there is one."""

    def __init__(self, *arguments: str, log: Path, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "kvstrata.cli.app", *arguments, "--log-format", "json"]
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)


class Cluster:
    """``masters`` share one Redis where there are several; ``hosts`` gives every process a host of its own."""

    def __init__(
        self,
        base: Path,
        *,
        masters: int = 1,
        nodes: int = 2,
        players: int = 0,
        hosts: bool = False,
        dram: str = "32MiB",
        ssd: str = "",
        transport: str = "auto",
        replicas: int = 1,
        master_options: Sequence[str] = (),
        node_options: Sequence[str] = (),
    ) -> None:
        self._base = base
        self._masters, self._nodes, self._players = masters, nodes, players
        self._dram, self._ssd, self._transport = dram, ssd, transport
        self._master_options, self._node_options = tuple(master_options), tuple(node_options)
        self._daemons: dict[str, Daemon] = {}
        self._playing: dict[str, subprocess.Popen[bytes]] = {}
        self._fixed: dict[str, dict[str, str]] = {}
        self._starts = 0
        self.hosts: Hosts | None = Hosts(masters + nodes + players + 1) if hosts else None
        self.redis: subprocess.Popen[bytes] | None = None
        try:
            if masters > 1:
                self._start_redis()
            for index in range(masters):
                self.start(f"master{index}")
            for index in range(masters):
                _ = self.daemon(f"master{index}").ready
            for index in range(nodes):
                self.start(f"node{index}")
            until(self.whole, START_S)
            if replicas > 1:
                self._set_replicas(replicas)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ names

    @property
    def masters(self) -> str:
        """The channel addresses of all masters, as clients and nodes take them."""
        return ",".join(self.address(f"master{index}") for index in range(self._masters))

    def names(self, kind: str) -> list[str]:
        count = {"master": self._masters, "node": self._nodes, "player": self._players}[kind]
        return [f"{kind}{index}" for index in range(count)]

    def daemon(self, name: str) -> Daemon:
        return self._daemons[name]

    def address(self, name: str) -> str:
        """Its channel: a master's is for life, a node's is another after each start."""
        fixed = self._fixed.get(name)
        return fixed["channel"] if fixed else str(self._daemons[name].ready["channel"])

    def host(self, name: str) -> Host | None:
        if self.hosts is None:
            return None
        kind, index = name.rstrip("0123456789"), int(name.lstrip("masterndoply") or 0)
        first = {"master": 0, "node": self._masters, "player": self._masters + self._nodes}[kind]
        return self.hosts[first + index]

    def pid(self, name: str) -> int:
        return self._playing[name].pid if name in self._playing else self._daemons[name].process.pid

    def where(self, name: str) -> tuple[Sequence[str], str]:
        """What runs a command there, and its address."""
        host = self.host(name)
        return (host.prefix, host.address) if host else ((), "127.0.0.1")

    # ------------------------------------------------------------------ starts

    def start(self, name: str) -> None:
        """Start a daemon that does not run; a master comes back where it was."""
        self._starts += 1
        prefix, address = self.where(name)
        command = self._master(name, address) if name.startswith("master") else self._node(name, address)
        self._daemons[name] = PlacedDaemon(*command, log=self._base / f"{name}.log", prefix=prefix)
        if name.startswith("master") and name not in self._fixed:
            ready = self._daemons[name].ready
            self._fixed[name] = {each: str(ready[each]) for each in ("channel", "grpc", "http")}

    def _master(self, name: str, address: str) -> list[str]:
        at = self._fixed.get(name) or dict.fromkeys(("channel", "grpc", "http"), f"{address}:0")
        where = ["--listen", at["channel"], "--grpc", at["grpc"], "--http", at["http"]]
        return ["master", *where, "--state", self._state(), *self._master_options]

    def _node(self, name: str, address: str) -> list[str]:
        size = ["--dram", self._dram, "--slab", "1MiB"]
        if self._ssd:
            size += ["--ssd", f"{self._base / f'{name}-ssd'}={self._ssd}"]
        where = ["--listen", f"{address}:0", "--http", f"{address}:0", "--data", str(self._base / name)]
        return ["storage", "--master", self.masters, *where, *size, *self._node_options]

    def _state(self) -> str:
        if self._masters == 1:
            return str(self._base / "state.db")
        return f"redis://{self.redis_address}/0"

    def _start_redis(self) -> None:
        host = self.hosts.hosts[-1] if self.hosts else None
        address = host.address if host else "127.0.0.1"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.redis_address = f"{address}:{port}"
        command = ["redis-server", "--port", str(port), "--bind", address, "--save", "", "--dir", str(self._base)]
        command += ["--protected-mode", "no"]
        self.redis = subprocess.Popen([*(host.prefix if host else ()), *command], stdout=subprocess.DEVNULL)
        until(lambda: _listens(self.redis_address))

    def _set_replicas(self, replicas: int) -> None:
        command = [sys.executable, "-m", "kvstrata.cli.app", "replicas", "set", "--default", str(replicas)]
        subprocess.run([*command, "--master", self.masters], check=True, timeout=30, capture_output=True)

    def play(self, name: str, seed: int, *more: str) -> None:
        """Start a player; its trace goes on where an earlier one of that name ended."""
        prefix, _ = self.where(name)
        command = [*prefix, sys.executable, "-m", "tests.chaos.player", self.masters, str(self.trace(name))]
        command += ["--seed", str(seed), "--transport", self._transport, *more]
        with (self._base / f"{name}.log").open("ab") as errors:
            self._playing[name] = subprocess.Popen(command, stderr=errors, cwd=ROOT)

    def trace(self, name: str) -> Path:
        return self._base / f"{name}.trace"

    # ------------------------------------------------------------------ faults

    def signal(self, name: str, number: int) -> None:
        """Returns when a stop or an end has really happened."""
        if name in self._playing:
            self._playing[name].send_signal(number)
            if number == signal.SIGKILL:
                self._playing[name].wait(END_S)
        else:
            self._daemons[name].signal(number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        if name in self._daemons:
            self._daemons[name].end()

    def cut(self, name: str, other: str = "") -> None:
        """Nothing goes between it and the other any more, or between it and everybody."""
        assert self.hosts is not None
        self.hosts.cut(self.where(name)[1], self.where(other)[1] if other else None)

    def mend(self, name: str, other: str = "") -> None:
        assert self.hosts is not None
        self.hosts.mend(self.where(name)[1], self.where(other)[1] if other else None)

    # ------------------------------------------------------------------ asking

    @contextlib.contextmanager
    def admin(self) -> Iterator[AdminClient]:
        """Some master that answers."""
        problem: KVError | None = None
        for index in range(self._masters):
            try:
                client = AdminClient(self.address(f"master{index}"))
            except KVError as error:
                problem = error
                continue
            with client:
                yield client
            return
        assert problem is not None
        raise problem

    def whole(self) -> bool:
        """Every master sees every node as active."""
        for name in self.names("master"):
            try:
                with AdminClient(self.address(name)) as admin:
                    if sum(row.state == "active" for row in admin.nodes()) != self._nodes:
                        return False
            except KVError:
                return False
        return True

    def at_rest(self) -> bool:
        """No lease and no reservation stands on any node."""
        with self.admin() as admin:
            rows = admin.nodes()
        return all(not row.status.leases and not row.status.reservations for row in rows)

    def http(self, name: str, path: str) -> dict[str, Any]:
        """What a daemon says over HTTP, well or not."""
        url = f"http://{self._daemons[name].ready['http']}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return dict(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            return dict(json.loads(error.read()))

    def logged(self, name: str, event: str) -> list[dict[str, Any]]:
        """What a daemon, in all its lives, has logged of one kind."""
        lines = (self._base / f"{name}.log").read_text().splitlines()
        return [record for line in lines if event in line and (record := json.loads(line))["event"] == event]

    def requests(self) -> int:
        """How many requests players have written down."""
        traces = [self.trace(name) for name in self.names("player")]
        return sum(trace.read_bytes().count(b"\n") for trace in traces if trace.exists())

    def traces(self) -> Traces:
        """All that all players have written down."""
        traces = Traces()
        for name in self.names("player"):
            if self.trace(name).exists():
                lines = self.trace(name).read_text().split("\n")
                traces.requests += [Request.parse(line) for line in lines[:-1]]
        return traces

    # ------------------------------------------------------------------ end

    def end_players(self) -> None:
        """Each ends after the request under way; one that does not in time is stuck."""
        for process in self._playing.values():
            process.send_signal(signal.SIGTERM)
        late = []
        until_s = time.monotonic() + END_S
        for name, process in self._playing.items():
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(name)
                process.kill()
                process.wait(END_S)
        assert not late, f"stuck: {late}"

    def close(self) -> None:
        """Safe twice; ends everything by its process id."""
        for process in self._playing.values():
            if process.poll() is None:
                process.kill()
            process.wait(END_S)
        for daemon in self._daemons.values():
            daemon.end()
        if self.redis is not None:
            self.redis.kill()
            self.redis.wait(END_S)
        if self.hosts is not None:
            self.hosts.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 0.5).close()
    except OSError:
        return False
    return True

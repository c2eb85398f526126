"""Real daemons for end-to-end tests: a master and nodes as processes, ended with the test."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.client.admin import AdminClient
from tests.waiting import until

READY_S = 30.0
ANY = "127.0.0.1:0"


class Daemon:
    """One child process and its ready line."""

    def __init__(self, *arguments: str, log: Path) -> None:
        command = [sys.executable, "-m", "kvstrata.cli.app", *arguments, "--log-format", "json"]
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)

    @cached_property
    def ready(self) -> dict[str, Any]:
        """The ready line, waited for."""
        assert self.process.stdout is not None
        fd, data = self.process.stdout.fileno(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            deadline = time.monotonic() + READY_S
            while not data.endswith(b"\n"):
                part = os.read(fd, 65536) if selector.select(max(0.0, deadline - time.monotonic())) else b""
                if not part:
                    self.end()
                    raise AssertionError(f"not ready: {data!r}; its log: {self._log.read_text()[-3000:]}")
                data += part
        return dict(json.loads(data))

    def signal(self, number: int) -> None:
        """Send a signal; returns when a stop or an end has really happened."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        elif number == signal.SIGKILL:
            self.process.wait(10)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


class RealPool:
    """A master and ``nodes`` storage nodes. Daemons can be killed, stopped and started again by name.

    ``options``: more of every node's command line.
    """

    def __init__(
        self, base: Path, nodes: int = 1, dram: str = "64MiB", listen: str = ANY, options: Sequence[str] = ()
    ) -> None:
        self._base, self._dram, self._options = base, dram, options
        self.daemons: dict[str, Daemon] = {}
        try:
            self.start_master(listen)
            for index in range(nodes):
                self.start_node(index)
            with AdminClient(self.address) as admin:
                until(lambda: sum(row.state == "active" for row in admin.nodes()) == nodes, READY_S)
        except BaseException:
            self.end()
            raise

    @property
    def address(self) -> str:
        return str(self.daemons["master"].ready["channel"])

    def start_master(self, listen: str) -> None:
        self.daemons["master"] = Daemon(
            "master", "--listen", listen, "--grpc", ANY, "--http", ANY, "--state", str(self._base / "state.db"),
            log=self._base / "master.log",
        )  # fmt: skip

    def start_node(self, index: int) -> None:
        name = f"node{index}"
        self.daemons[name] = Daemon(
            "storage", "--master", self.address, "--listen", ANY, "--http", ANY,
            "--data", str(self._base / name), "--dram", self._dram, *self._options,
            log=self._base / f"{name}.log",
        )  # fmt: skip

    def node(self, index: int = 0) -> Daemon:
        return self.daemons[f"node{index}"]

    def node_named(self, node_id: str) -> Daemon:
        return next(d for d in self.daemons.values() if d.ready.get("node_id") == node_id)

    def end(self) -> None:
        for daemon in self.daemons.values():
            daemon.end()


def keys(count: int, chain: str = "c", width: int = 16) -> bytes:
    """The packed hashes of a chain."""
    return b"".join(hashlib.blake2b(f"{chain}/{i}".encode(), digest_size=width).digest() for i in range(count))


def payload(hashes: bytes, salt: str, block_bytes: int, width: int = 16) -> npt.NDArray[np.uint8]:
    """u8[n, block_bytes]: a pseudo-random stream of each key, so that wrong, stale and torn bytes all show."""
    rows = np.empty((len(hashes) // width, block_bytes), np.uint8)
    for i, row in enumerate(rows):
        seed = hashlib.blake2b(hashes[i * width : (i + 1) * width] + salt.encode(), digest_size=8).digest()
        row[:] = np.frombuffer(np.random.default_rng(int.from_bytes(seed, "little")).bytes(block_bytes), np.uint8)
    return rows

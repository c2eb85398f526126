"""``kvstrata dev``: a master and n storage nodes on this machine, in the foreground; Ctrl-C ends all."""

from __future__ import annotations

import contextlib
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.cli.daemons import Config, Format, Level, refuse_ssd
from kvstrata.cli.output import expected_errors
from kvstrata.cli.process import LogFormat, LogLevel, configure_logs, ready_printer
from kvstrata.cli.replay.processes import Child, command, ready_line
from kvstrata.cli.sizes import size_flag
from kvstrata.proto.errors import ConfigError
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

NODES_MAX = 64
STOP_S = 10.0
LOG_STEP_S = 0.2


@dataclass(frozen=True, slots=True)
class Layout:
    """Which port each daemon listens on: from ``port_base`` upwards, or free ones when it is 0."""

    port_base: int

    def port(self, offset: int) -> str:
        return f"127.0.0.1:{self.port_base + offset if self.port_base else 0}"

    def master(self) -> tuple[str, str, str]:
        return self.port(0), self.port(1), self.port(2)

    def node(self, index: int) -> tuple[str, str]:
        return self.port(10 + 2 * index), self.port(11 + 2 * index)


class Cluster:
    """The daemons of one ``dev``, each a child process that dies with this one."""

    def __init__(self, data: Path, layout: Layout, nodes: int, dram_bytes: int, slab_bytes: int | None) -> None:
        self._data = data
        self._layout = layout
        self._dram_bytes = dram_bytes
        self._slab_bytes = slab_bytes
        self.children: dict[str, Child] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self._offsets: dict[Path, int] = {}
        self._start_master()
        for index in range(nodes):
            self._start_node(index)
        for name in list(self.children)[1:]:
            self.facts[name] = ready_line(self.children[name])

    def ready(self) -> dict[str, object]:
        """The facts of the ready line."""
        nodes = [
            {key: facts[key] for key in ("node_id", "pid", "channel", "http", "dram_bytes") if key in facts}
            for name, facts in self.facts.items()
            if name != "master"
        ]
        master = self.facts["master"]
        return {
            "event": "ready",
            "role": "dev",
            "master": master["channel"],
            "grpc": master["grpc"],
            "http": master["http"],
            "master_pid": master["pid"],
            "nodes": nodes,
        }

    def _start_master(self) -> None:
        listen, grpc, http = self._layout.master()
        state = str(self._data / "master.db")
        arguments = ["--listen", listen, "--grpc", grpc, "--http", http, "--state", state]
        self.facts["master"] = ready_line(self._start("master", ["master", *arguments]))

    def _start_node(self, index: int) -> Child:
        listen, http = self._layout.node(index)
        arguments = ["--master", str(self.facts["master"]["channel"]), "--listen", listen, "--http", http]
        arguments += ["--data", str(self._data / f"node-{index}"), "--dram", str(self._dram_bytes)]
        if self._slab_bytes:
            arguments += ["--slab", str(self._slab_bytes)]
        return self._start(f"node-{index}", ["storage", *arguments])

    def _start(self, name: str, arguments: list[str]) -> Child:
        errors = self._data / f"{name}.log"
        child = command(name, *arguments, "--log-format", "json", errors=errors)
        self.children[name] = child
        return child

    # ------------------------------------------------------------------ while it runs

    def relay_logs(self) -> None:
        """Copy what the daemons logged since the last time, each line with who says it."""
        for name, child in self.children.items():
            if child.errors is None or not child.errors.exists():
                continue
            with child.errors.open("rb") as lines:
                lines.seek(self._offsets.get(child.errors, 0))
                for line in lines.read().decode(errors="replace").splitlines():
                    sys.stderr.write(f"[{name}] {line}\n")
                self._offsets[child.errors] = lines.tell()

    def look_after(self, restart: bool) -> None:
        """Report children that died, and start them again if asked to."""
        for name, child in list(self.children.items()):
            if not (death := child.died()):
                continue
            del self.children[name]
            log.warning("a daemon died", name=name, how=death, restarting=restart)
            if restart and name == "master":
                self._pin_master()
                self._start_master()
            elif restart:
                self.facts[name] = ready_line(self._start_node(int(name.removeprefix("node-"))))

    def _pin_master(self) -> None:
        """A restarted master must come back where nodes and clients look for it."""
        for flag in ("channel", "grpc", "http"):
            assert self.facts["master"][flag]
        facts = self.facts["master"]
        channel, grpc, http = str(facts["channel"]), str(facts["grpc"]), str(facts["http"])
        self._layout = _Pinned(self._layout.port_base, (channel, grpc, http))

    def stop(self) -> None:
        """Nodes first, so that they can say goodbye; then the master. Each within the deadline."""
        deadline = time.monotonic() + STOP_S
        nodes = [child for name, child in self.children.items() if name != "master"]
        for child in nodes:
            if not child.died():
                child.process.terminate()
        for child in nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.1, deadline - time.monotonic()))
            child.stop(1.0)
        if "master" in self.children:
            self.children["master"].stop(max(1.0, deadline - time.monotonic()))


@dataclass(frozen=True, slots=True)
class _Pinned(Layout):
    """A layout whose master keeps the ports it was first given."""

    where: tuple[str, str, str] = ("", "", "")

    def master(self) -> tuple[str, str, str]:
        return self.where


def dev(
    config: Config = None,
    nodes: Annotated[int, typer.Option(help="Storage nodes.", min=1, max=NODES_MAX)] = 2,
    dram: Annotated[int, size_flag(help="Memory of each node.")] = 512 << 20,
    ssd: Annotated[str | None, typer.Option(help="SSD of each node (not in this version).")] = None,
    port_base: Annotated[int, typer.Option(help="First port; 0 picks free ones.", min=0, max=60000)] = 7400,
    data: Annotated[Path | None, typer.Option(help="Keep state here; by default it goes with the cluster.")] = None,
    slab: Annotated[int | None, size_flag(help="Bytes of one slab.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start a daemon again when it dies.")] = False,
    log_format: Format = LogFormat.text,
    log_level: Level = LogLevel.info,
) -> None:
    """Run a master and some storage nodes on this machine; Ctrl-C ends all."""
    with expected_errors():
        configure_logs(log_format, log_level)
        refuse_ssd(ssd)
        with _stop_signals() as stopped, _home(data) as home:
            cluster: Cluster | None = None
            try:
                cluster = Cluster(home, Layout(port_base), nodes, dram, slab)
                ready_printer(log_format)(cluster.ready())
                while not stopped.wait(LOG_STEP_S):
                    cluster.relay_logs()
                    cluster.look_after(restart)
            finally:
                if cluster is not None:
                    cluster.stop()
                    cluster.relay_logs()


class _Stopped:
    """Set by SIGINT or SIGTERM; ``wait`` returns at once when one comes."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.signal = 0

    def wait(self, seconds: float) -> bool:
        if not self.signal:
            self._selector.select(seconds)
        return bool(self.signal)


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stopped]:
    import os

    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        stopped = _Stopped(selector)

        def note(number: int, _: object) -> None:
            stopped.signal = number
            with contextlib.suppress(BlockingIOError):
                os.write(write, b"x")

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield stopped
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(read)
            os.close(write)


@contextlib.contextmanager
def _home(data: Path | None) -> Iterator[Path]:
    """The cluster's directory: the user's, kept; or a temporary one, removed."""
    if data is None:
        with tempfile.TemporaryDirectory(prefix="kvstrata-dev-") as temporary:
            yield Path(temporary)
        return
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {data}: {error.strerror or error}") from error
    yield data

"""``kvstrata dev``: a master and n storage nodes on this machine, in the foreground; Ctrl-C ends all."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.cli.daemons import Config, Format, Level
from kvstrata.cli.output import expected_errors
from kvstrata.cli.process import LogFormat, LogLevel, configure_logs, ready_printer
from kvstrata.cli.sizes import size_flag
from kvstrata.proto.errors import ConfigError

NODES_MAX = 64
STEP_S = 0.2


def dev(
    config: Config = None,
    nodes: Annotated[int, typer.Option(help="Storage nodes.", min=1, max=NODES_MAX)] = 2,
    dram: Annotated[int, size_flag(help="Memory of each node.")] = 512 << 20,
    ssd: Annotated[int | None, size_flag(help="Room on this machine's disk for each node's SSD tier.")] = None,
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
        from kvstrata.cli.cluster import Cluster, Plan

        with _stop_signals() as stopped, _home(data) as home:
            as_json = log_format is LogFormat.json
            plan = Plan(home, nodes, dram, slab, port_base, restart, as_json, log_level.value, ssd_bytes=ssd)
            cluster = Cluster(plan)
            try:
                if cluster.start(stopped.wait):
                    ready_printer(log_format)(cluster.ready())
                while not stopped.wait(STEP_S):
                    cluster.step()
            finally:
                cluster.stop()


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

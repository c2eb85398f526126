"""A pool of Mooncake Store on free ports of this host: a master, and a client process that holds the memory."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final, Self

from kvstrata.cli.replay.processes import Child, die_with_parent
from kvstrata.proto.errors import Unavailable

READY_S: Final = 60.0
POLL_S: Final = 0.1
#: What is used stays for so long whatever comes: 10 s by default, in which a replay, whose time is virtual, uses
#: everything. Much less, and loads of a busy machine find their lease expired.
LEASE_MS: Final = 1000


class MooncakeServers:
    """``master`` and ``holder`` are addresses; ``nbytes`` of memory are shared. Stop it."""

    def __init__(self, packages: Path, nbytes: int) -> None:
        """``packages``: site-packages with Mooncake in them. Raises :class:`Unavailable` when one does not come up."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvstrata-mooncake-")
        self._children: list[Child] = []
        self._programs = packages / "mooncake"
        self.master, metrics, self.holder = (f"127.0.0.1:{port}" for port in _free_ports(3))
        try:
            self._start(
                "mooncake_master",
                f"--rpc_address=127.0.0.1 --rpc_port={_port(self.master)} --metrics_host=127.0.0.1 "
                f"--metrics_port={_port(metrics)} --default_kv_lease_ttl={LEASE_MS} --logtostderr=true",
                self.master,
            )
            self._start(
                "mooncake_client",
                f"--host=127.0.0.1 --port={_port(self.holder)} --metadata_server=P2PHANDSHAKE "
                f"--global_segment_size={nbytes} --local_buffer_size={64 << 20} --protocol=tcp "
                f"--master_server_address={self.master}",
                self.holder,
            )
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str, flags: str, address: str) -> None:
        log = Path(self._folder.name) / f"{name}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [self._programs / name, *flags.split()],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=self._folder.name,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        child = Child(name, process, log)
        self._children.append(child)
        until = time.monotonic() + READY_S
        while not _answers(address):
            if (death := child.died()) or time.monotonic() > until:
                raise Unavailable(f"{death or f'{name} does not listen at {address}'}: {child.last_words()}")
            time.sleep(POLL_S)

    def losses(self) -> list[str]:
        return [death for child in self._children if (death := child.died())]

    def stop(self) -> None:
        for child in reversed(self._children):
            child.stop()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _free_ports(count: int) -> list[int]:
    """Free a moment ago, all of them at once: these servers cannot choose their own."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _answers(address: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(_port(address))), timeout=1.0).close()
    except OSError:
        return False
    return True

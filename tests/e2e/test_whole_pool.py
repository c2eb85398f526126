"""docs/whole-pool.md, typed in as it stands: three masters, four nodes, TLS and tokens, all restarted under traffic.

Meanwhile the status of every master is read over HTTPS, and held against which processes are really there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.transfer.security.tls import client_context
from tests.e2e.secured_daemons import ask
from tests.processes import alive
from tests.redis_server import needs_redis
from tests.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "whole-pool.md"
MASTERS, NODES = (1, 2, 3), (1, 2, 3, 4)
#: For one section of the page, on a machine that is far too busy: the upgrade restarts seven processes.
SECTION_S = 240.0
#: What is gone for so long is shown as such: a goodbye is known at once, a new leader in 3 s, the page is a second old.
KNOWN_S = 6.0
POLL_S = 0.3


def sections() -> dict[str, str]:
    """What the page types under each heading."""
    found: dict[str, str] = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]:
        title, _, text = part.partition("\n")
        found[title] = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S))
    return found


def free_hundred() -> str:
    """The digits before the last two of ports that are all free, below those that the kernel gives to callers."""
    for hundred in range(110 + os.getpid() % 100, 320):
        with contextlib.ExitStack() as stack:
            try:
                for last in range(100):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", hundred * 100 + last))
            except OSError:
                continue
            return str(hundred)
    raise AssertionError("no hundred ports in a row are free")


class Shell:
    """One bash in which the page is typed, section by section."""

    def __init__(self, folder: Path, ports: str) -> None:
        self.folder, self._ports = folder, ports
        self.took: list[float] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTRATA")}
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
        self._log = folder / "bash.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash"], cwd=folder, env={**kept, "PATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def type(self, text: str) -> str:
        """What it prints. The last command has to end well, within :data:`SECTION_S`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        block = self.folder / "section.sh"
        block.write_text(
            text.replace("127.0.0.1:75", f"127.0.0.1:{self._ports}").replace("port 75", f"port {self._ports}")
        )
        self.process.stdin.write(b'. ./section.sh < /dev/null; echo "@@ $?"\n')
        self.process.stdin.flush()
        fd, said, deadline = self.process.stdout.fileno(), b"", time.monotonic() + SECTION_S
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while not (ended := re.search(rb"@@ (\d+)\n$", said)):
                part = os.read(fd, 65536) if selector.select(max(0.0, deadline - time.monotonic())) else b""
                assert part, f"does not end: {text}\n{said.decode()}\n{self.logs()}"
                said += part
        self.took.append(round(time.monotonic() - deadline + SECTION_S, 1))
        assert ended[1] == b"0", f"{text}\n{said.decode()}\n{self.logs()}"
        return said.decode()

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def pid(self, name: str) -> int:
        """Of the last process of that name; 0 before the first."""
        try:
            return int((self.folder / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return 0

    def end(self) -> None:
        """All is in the shell's own process group, but for engines of a replay, which end when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def serves(bash: Shell, name: str) -> bool:
    """It has said that it is ready. One that has ended instead is an error at once."""
    assert alive(bash.pid(name)), f"{name} has ended\n{bash.logs()}"
    return " ready: " in (bash.folder / f"{name}.log").read_text()


class Watch:
    """Reads every master's status again and again, and notes what is not so."""

    def __init__(self, shell: Shell, ports: str) -> None:
        self._shell = shell
        self._token = (shell.folder / "pool" / "read.token").read_text().strip()
        self._tls: ssl.SSLContext = client_context(shell.folder / "pool" / "ca.pem")
        self._http = {n: f"127.0.0.1:{ports}{n}2" for n in MASTERS}
        self._channels = {f"127.0.0.1:{ports}{n}0": f"master-{n}" for n in MASTERS}
        self._gone: dict[str, float] = {}
        self._leaders: dict[int, set[str]] = {}
        self.documents = dict.fromkeys(MASTERS, 0)
        self.untrue: list[str] = []
        self.least_active = len(NODES)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    @property
    def epochs(self) -> list[int]:
        return sorted(self._leaders)

    def status(self, n: int) -> dict[str, Any]:
        """Raises :class:`OSError` where nobody answers."""
        code, body = ask(self._http[n], "GET", "/status.json", self._token, tls=self._tls)
        assert code == 200, (n, code, body)
        return dict(json.loads(body))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            self._note_gone()
            for n in MASTERS:
                try:
                    document = self.status(n)
                except OSError:
                    continue  # it is being restarted
                except AssertionError as error:
                    self.untrue.append(str(error))
                    continue
                self.documents[n] += 1
                self.untrue += [f"master-{n}: {each}" for each in self._untrue(document)]

    def _note_gone(self) -> None:
        for name in (*(f"node-{n}" for n in NODES), *self._channels.values()):
            if alive(self._shell.pid(name)):
                self._gone.pop(name, None)
            else:
                self._gone.setdefault(name, time.monotonic())

    def _long_gone(self, name: str) -> bool:
        return time.monotonic() - self._gone.get(name, time.monotonic()) > KNOWN_S and not alive(self._shell.pid(name))

    def _untrue(self, document: dict[str, Any]) -> Iterator[str]:
        nodes = {row["node_id"]: row["state"] for row in document["nodes"]}
        active = [name for name, state in nodes.items() if state == "active"]
        totals, gone = document["totals"], [row for row in document["nodes"] if row["gone"]]  # these said goodbye
        if totals["nodes_active"] != len(active) or totals["nodes"] != len(nodes) - len(gone) or len(gone) > 1:
            yield f"totals {totals} of {nodes}"
        if set(nodes) != {f"node-{n}" for n in NODES}:
            yield f"nodes {sorted(nodes)}"
        if any(self._long_gone(name) for name in active):
            yield f"{nodes}, and not alive are {sorted(self._gone)}"
        if document["master"]["ready"]:
            self.least_active = min(self.least_active, len(active))
        leader = document["leader"]
        if leader is not None and self._long_gone(self._channels[leader["channel"]]):
            yield f"{leader} leads, and is gone"
        if document["master"]["leading"]:
            by = self._leaders.setdefault(document["master"]["epoch"], set())
            by.add(document["master"]["channel"])
            if len(by) > 1:
                yield f"{by} lead in one epoch"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[tuple[Shell, str]]:
    needs_redis()
    pytest.importorskip("cryptography")
    ports = free_hundred()
    running = Shell(tmp_path, ports)
    try:
        yield running, ports
    finally:
        running.end()


def figures(said: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(\w+) (-?[\d.e-]+)$", said, re.M)}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_from_the_first_command_to_the_last(shell: tuple[Shell, str]) -> None:
    bash, ports = shell
    typed = sections()
    for title in ("Secrets", "Redis", "Masters and nodes"):
        bash.type(typed[title])
    for name in (*(f"master-{n}" for n in MASTERS), *(f"node-{n}" for n in NODES)):
        until(lambda name=name: serves(bash, name), SECTION_S)  # type: ignore[misc]
    seen = bash.type(typed["Look at it"])
    assert "4 of 4 nodes active" in seen and "HEALTHY" in seen and "\n0 problems, 0 warnings" in seen
    watch = Watch(bash, ports)
    try:
        watch.start()
        bash.type(typed["Traffic"])
        before = {name: bash.pid(name) for name in (*(f"master-{n}" for n in MASTERS), *(f"node-{n}" for n in NODES))}
        bash.type(typed["Upgrade"])
        assert not [name for name, pid in before.items() if alive(pid) or not alive(bash.pid(name))]
        said = bash.type(typed["What the traffic noticed"])
        until(lambda: one_leader(watch), 30)
    finally:
        watch.close()
    found = figures(said)
    print(found, watch.documents, bash.took)  # shown with -s, and where it fails
    assert found["requests"] > 0 and found["failed_requests"] == 0 and found["wrong_bytes"] == 0
    # Zero as a rule: a call may come too late on a busy machine.
    assert found["worst_points"] > -5.0
    assert not watch.untrue, "\n".join(watch.untrue[:20])
    assert min(watch.documents.values()) > 10 and watch.least_active == len(NODES) - 1
    assert len(watch.epochs) == 2, "the leader was the last one to be restarted"
    drained = [path.read_text().count("stopping: drained") for path in sorted(bash.folder.glob("node-?.log"))]
    assert drained == [1] * len(NODES)
    secret = [path.read_text().strip() for path in (bash.folder / "pool").glob("*.token")]
    secret += [(bash.folder / "redis.password").read_text().strip()]
    logs = "".join(path.read_text() for path in bash.folder.glob("*.log")) + said + seen
    assert not [each for each in secret if each in logs]
    bash.type(typed["End it"])
    assert not [name for name in (*before, "redis") if alive(bash.pid(name))]


def one_leader(watch: Watch) -> bool:
    """Every master names the same one, and only that one says it of itself."""
    try:
        seen = [watch.status(n) for n in MASTERS]
    except OSError:
        return False
    named = {document["leader"]["channel"] if document["leader"] else "" for document in seen}
    return len(named) == 1 and [d["master"]["channel"] for d in seen if d["master"]["leading"]] == list(named)

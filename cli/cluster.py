"""A master and n storage nodes as child processes: started, watched, started again if asked, ended in order."""

from __future__ import annotations

import contextlib
import select
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstrata.cli.relay import Relay
from kvstrata.cli.replay.processes import READY_S, Child, command, ready_line
from kvstrata.cli.replay.roster import Roster
from kvstrata.proto.errors import ConfigError, KVError
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

STOP_S: Final = 10.0
KILL_S: Final = 1.0
POLL_S: Final = 0.05
#: A daemon that dies at once is not started more often than this.
AGAIN_S: Final = 1.0
USAGE_CODE: Final = 2

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. Ports go from ``port_base`` upwards, or are free ones when it is 0."""

    home: Path
    nodes: int
    dram_bytes: int
    slab_bytes: int | None = None
    port_base: int = 0
    restart: bool = False
    json_logs: bool = False
    log_level: str = "info"
    ssd_bytes: int | None = None

    def port(self, offset: int) -> str:
        return f"127.0.0.1:{self.port_base + offset if self.port_base else 0}"


@dataclass(slots=True)
class Member:
    """One daemon: ``facts`` is its last ready line, also while it is down; ``again_at``: not started before."""

    name: str
    relay: Relay
    child: Child | None = None
    facts: Facts | None = None
    serving: bool = False
    again_at: float = 0.0


class Cluster:
    """``start`` once, ``step`` often, ``stop`` always: nothing outlives it, and it reports who dies."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        names = ["master", *(f"node-{index}" for index in range(plan.nodes))]
        self._members = {name: Member(name, Relay(name, self._log_file(name), plan.json_logs)) for name in names}

    def start(self, stopped: Callable[[float], bool]) -> bool:
        """Start all and wait until they serve; False when ``stopped`` (a wait of so many seconds) said so meanwhile.

        Raises :class:`ConfigError` when a daemon refuses its options or its port, :class:`KVError` when one
        ends for another reason or is not ready within ``READY_S``.
        """
        master, *nodes = self._members.values()
        for group in ([master], nodes):
            for member in group:
                self._launch(member)
            if not self._await(group, stopped):
                return False
        # A node serves before its master has heard of it: whoever reads the ready line may store at once.
        assert master.facts is not None
        Roster.with_nodes(str(master.facts["channel"]), len(nodes), READY_S)
        return True

    def ready(self) -> Facts:
        """The facts of the ready line; only after ``start`` returned True."""
        master, *nodes = (member.facts or {} for member in self._members.values())
        told = ("node_id", "pid", "channel", "unix", "http", "dram_bytes", "ssd_bytes")
        return {
            "event": "ready",
            "role": "dev",
            "master": master["channel"],
            "grpc": master["grpc"],
            "http": master["http"],
            "master_pid": master["pid"],
            "nodes": [{key: facts[key] for key in told if key in facts} for facts in nodes],
        }

    def step(self) -> None:
        """Copy log lines, note who serves, report who died, start again what is due. Raises when all have died."""
        for member in self._members.values():
            member.relay.poll()
            if member.child is not None and (death := member.child.died()):
                self._bury(member, death)
            elif member.child is not None and not member.serving:
                self._note_ready(member)
            elif member.child is None and self._plan.restart and time.monotonic() >= member.again_at:
                self._launch(member)
        if not self._plan.restart and all(member.child is None for member in self._members.values()):
            raise KVError("every daemon has died: what they said is above")

    def stop(self) -> None:
        """Nodes first, so that they can say goodbye; then the master. SIGKILL past the deadline."""
        deadline = time.monotonic() + STOP_S
        master, *nodes = (member.child for member in self._members.values())
        for group in (nodes, [master]):
            living = [child for child in group if child is not None]
            for child in living:
                if not child.died():
                    child.process.terminate()
            for child in living:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(KILL_S, deadline - time.monotonic()))
                child.stop(KILL_S)
        for member in self._members.values():
            member.relay.poll(last=True)

    # ------------------------------------------------------------------ one member

    def _launch(self, member: Member) -> None:
        own = self._master_arguments(member) if member.name == "master" else self._node_arguments(member)
        written = ("--log-format", "json", "--log-level", self._plan.log_level)
        member.child = command(member.name, *own, *written, errors=self._log_file(member.name))
        member.serving = False
        member.again_at = time.monotonic() + AGAIN_S

    def _master_arguments(self, member: Member) -> list[str]:
        """A master that starts again comes back where nodes and clients look for it."""
        ports = {"channel": self._plan.port(0), "grpc": self._plan.port(1), "http": self._plan.port(2)}
        listen, grpc, http = (str((member.facts or ports)[name]) for name in ports)
        state = str(self._plan.home / "master.db")
        return ["master", "--listen", listen, "--grpc", grpc, "--http", http, "--state", state]

    def _node_arguments(self, member: Member) -> list[str]:
        index = int(member.name.removeprefix("node-"))
        above = self._members["master"].facts
        assert above is not None, "nodes start after the master has said where it is"
        arguments = ["storage", "--master", str(above["channel"])]
        arguments += ["--listen", self._plan.port(10 + 2 * index), "--http", self._plan.port(11 + 2 * index)]
        arguments += ["--data", str(self._plan.home / member.name), "--dram", str(self._plan.dram_bytes)]
        if self._plan.ssd_bytes:
            arguments += ["--ssd", f"{self._plan.home / member.name / 'ssd'}={self._plan.ssd_bytes}"]
        return arguments + (["--slab", str(self._plan.slab_bytes)] if self._plan.slab_bytes else [])

    def _await(self, group: list[Member], stopped: Callable[[float], bool]) -> bool:
        deadline = time.monotonic() + READY_S
        while waiting := [member for member in group if not member.serving]:
            if stopped(POLL_S):
                return False
            for member in waiting:
                assert member.child is not None
                if member.child.died():
                    raise _not_started(member.child)
                self._note_ready(member)
            if time.monotonic() > deadline:
                raise KVError(f"{waiting[0].name} is not ready after {READY_S:g} s")
        return True

    def _note_ready(self, member: Member) -> None:
        """Read the ready line if it has come; it is written in one piece."""
        assert member.child is not None and member.child.process.stdout is not None
        if select.select([member.child.process.stdout], [], [], 0)[0] and not member.child.died():
            member.facts = ready_line(member.child, KILL_S)
            member.serving = True

    def _bury(self, member: Member, death: str) -> None:
        assert member.child is not None
        log.warning("a daemon died", name=member.name, how=death, starts_again=self._plan.restart)
        member.child.stop()
        member.child, member.serving = None, False

    def _log_file(self, name: str) -> Path:
        return self._plan.home / f"{name}.log"


def _not_started(child: Child) -> KVError:
    """Why a daemon ended before it served: its own ``error:`` line where there is one."""
    said = child.last_words()
    errors = [line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")]
    text = f"{child.name} did not start: {errors[-1] if errors else said or child.died()}"
    return ConfigError(text) if child.process.returncode == USAGE_CODE else KVError(text)

"""Containers of a rendered chart as processes of this machine: the same arguments, with paths and ports replaced."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helm.rendering import Object, main_container, pod

READY_S = 60.0
#: Flags whose value is where to listen.
_LISTENERS = ("--listen", "--grpc", "--http")


@dataclass
class Running:
    """A container's process, once it has said that it is ready. ``http``: its own address of port ``http``."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    container: Object
    grace_s: float

    @property
    def http(self) -> str:
        return str(self.ready["http"])

    def get(self, path: str) -> tuple[int, str]:
        """(status, body)."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def probe(self, name: str) -> int:
        """What the kubelet would see of a probe."""
        asked = self.container[name]["httpGet"]
        assert asked["port"] in {port["name"] for port in self.container["ports"]} and asked["port"] == "http"
        return self.get(asked["path"])[0]

    def end(self) -> int:
        """SIGTERM, and the exit code within the grace period."""
        self.process.terminate()
        return self.process.wait(self.grace_s)


def environment_of(container: Object, fields: dict[str, str]) -> dict[str, str]:
    """What the container has: its own variables and a path. ``fields`` are of the downward API."""
    return {
        each["name"]: each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }


def arguments_of(container: Object, environment: dict[str, str]) -> list[str]:
    """Arguments as the kubelet expands them; a variable that is not there stays, as it does there."""
    return [
        re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), argument)
        for argument in container["args"]
    ]


def local(arguments: list[str], base: Path, masters: str, paths: list[str]) -> list[str]:
    """The same on this machine: free ports of loopback, ``masters``, ``paths`` below ``base``."""
    mounted = re.compile(rf"(^|[=&])({'|'.join(map(re.escape, paths))})(?=[/=&]|$)")
    here: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in _LISTENERS:
            value = "127.0.0.1:0"
        elif flag == "--advertise":
            value = "127.0.0.1"
        elif flag == "--master":
            value = masters
        here.append(flag + equals + mounted.sub(rf"\g<1>{base}\g<2>", value))
    return here


def start(workload: Object, base: Path, fields: dict[str, str], masters: str = "") -> Running:
    """Run the workload's container: what it mounts is a directory below ``base``, made if it is not there."""
    container = main_container(workload)
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in mounted:
        (base / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    environment = environment_of(container, fields)
    arguments = local(arguments_of(container, environment), base, masters, mounted)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstrata.cli.app", *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        stdout=subprocess.PIPE,
        stderr=(base / "log").open("ab"),
        text=True,
    )
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], READY_S)[0] or not (line := process.stdout.readline()):
        process.kill()
        process.wait(10)
        raise AssertionError(f"{container['name']} did not start: {(base / 'log').read_text()[-2000:]}")
    return Running(process, json.loads(line), container, pod(workload)["terminationGracePeriodSeconds"])


def close(running: Running) -> None:
    """End it, whatever state it is in."""
    if running.process.poll() is None:
        running.process.terminate()
        try:
            running.process.wait(20)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait(10)
    if running.process.stdout is not None:
        running.process.stdout.close()

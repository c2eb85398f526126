"""Network namespaces as hosts: each with an address of its own, all behind one router that can cut and throttle.

A cut is a rule of the router that drops packets in silence, as a dead switch port does: no process sees an
error, its peers only hear nothing more. Needs root and iproute2; :func:`why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

#: Benchmark addresses of RFC 2544: never routed, so no test shadows a real network.
_NETWORKS = tuple(f"198.{18 + high}.{low}" for high in (0, 1) for low in range(256))
_HOSTS_MAX = 50


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace. ``prefix`` before a command runs it there, in the same process id."""

    name: str
    address: str
    #: Its end of its cable, and the router's.
    device: str
    cable: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


@functools.cache
def why_not() -> str:
    """Why hosts cannot be made here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed: apt-get install iproute2"
    try:
        with Hosts(1) as hosts:
            hosts.cut(hosts[0].address)
            hosts.throttle(hosts[0], "10mbit")
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"network namespaces do not work here: {error}"
    return ""


class Hosts:
    """``count`` hosts behind a router; the test process is on the same network, at ``here``.

    Everything goes with :meth:`close`: what runs on the hosts must have ended by then.
    """

    def __init__(self, count: int) -> None:
        assert 0 < count <= _HOSTS_MAX
        self._tag = f"kv{secrets.token_hex(3)}"
        self._router = f"{self._tag}-r"
        self._rules: set[tuple[str, str]] = set()
        self.hosts: list[Host] = []
        try:
            self._build(count)
        except BaseException:
            self.close()
            raise

    def _build(self, count: int) -> None:
        self._network = _free_network()
        _ip("netns", "add", self._router)
        _run(*self._in_router("sysctl", "-qw", "net.ipv4.ip_forward=1"))
        _ip("-n", self._router, "link", "set", "lo", "up")
        self.here = f"{self._network}.1"
        self._cable(f"{self._tag}h", f"{self._tag}g", self.here, f"{self._network}.2", None)
        _ip("route", "add", f"{self._network}.0/24", "via", f"{self._network}.2")
        for index in range(count):
            near, far = f"{self._network}.{4 + 4 * index + 1}", f"{self._network}.{4 + 4 * index + 2}"
            host = Host(f"{self._tag}-{index}", near, f"{self._tag}e{index}", f"{self._tag}r{index}")
            _ip("netns", "add", host.name)
            self.hosts.append(host)
            _ip("-n", host.name, "link", "set", "lo", "up")
            self._cable(host.device, host.cable, near, far, host.name)
            _ip("-n", host.name, "route", "add", "default", "via", far)

    def _cable(self, near: str, far: str, near_address: str, far_address: str, host: str | None) -> None:
        inside = ("-n", host) if host else ()
        _ip("link", "add", near, *(("netns", host) if host else ()), "type", "veth", "peer", far, "netns", self._router)
        _ip(*inside, "addr", "add", f"{near_address}/30", "dev", near)
        _ip(*inside, "link", "set", near, "up")
        _ip("-n", self._router, "addr", "add", f"{far_address}/30", "dev", far)
        _ip("-n", self._router, "link", "set", far, "up")

    def _in_router(self, *command: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._router, *command)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    # ------------------------------------------------------------------ faults

    def cut(self, one: str, other: str | None = None) -> None:
        """Drop in silence what goes between two addresses, or between one and everybody."""
        for rule in self._between(one, other):
            if rule not in self._rules:
                _ip("-n", self._router, "rule", "add", *_words(rule), "blackhole")
                self._rules.add(rule)

    def mend(self, one: str, other: str | None = None) -> None:
        for rule in self._between(one, other):
            if rule in self._rules:
                _ip("-n", self._router, "rule", "del", *_words(rule), "blackhole")
                self._rules.discard(rule)

    @staticmethod
    def _between(one: str, other: str | None) -> tuple[tuple[str, str], ...]:
        return ((one, other or "all"), (other or "all", one))

    def throttle(self, host: Host, rate: str) -> None:
        """Let so much through in each direction, as ``10mbit``."""
        for inside, cable in ((self._router, host.cable), (host.name, host.device)):
            _run("tc", "-n", inside, "qdisc", "replace", "dev", cable, "root", "tbf",
                 "rate", rate, "burst", "32kbit", "latency", "400ms")  # fmt: skip

    def unthrottle(self, host: Host) -> None:
        for inside, cable in ((self._router, host.cable), (host.name, host.device)):
            _run("tc", "-n", inside, "qdisc", "del", "dev", cable, "root")

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Safe twice, and after a start that failed half way."""
        for name in (*(host.name for host in self.hosts), self._router):
            with contextlib.suppress(subprocess.SubprocessError, RuntimeError):
                _ip("netns", "del", name)
        self.hosts = []
        with contextlib.suppress(subprocess.SubprocessError, RuntimeError):
            _ip("link", "del", f"{self._tag}h")  # gone with the router already, most times

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _words(rule: tuple[str, str]) -> Sequence[str]:
    return ("from", rule[0], "to", rule[1])


def _free_network() -> str:
    """A /24 that this machine knows no route to."""
    routes = _run("ip", "-4", "route").split()
    first = secrets.randbelow(len(_NETWORKS))
    for network in itertools.islice(itertools.cycle(_NETWORKS), first, first + len(_NETWORKS)):
        if not any(word.startswith(f"{network}.") for word in routes):
            return network
    raise RuntimeError("no free network")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout

"""Which ports daemons can have here, and who has those they cannot."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvstrata.cli.doctor.rows import Check, Row, Verdict
from kvstrata.transfer.identity import parse_address

#: Where daemons listen when nobody says otherwise.
DEFAULTS: Final = ("127.0.0.1:7400", "127.0.0.1:7401", "127.0.0.1:7402", "127.0.0.1:7410", "127.0.0.1:7411")


def checks(addresses: Sequence[str]) -> list[Check]:
    """``addresses`` that daemons are to listen on; none: their defaults, where a stranger is only a warning."""
    wanted = bool(addresses)
    return [
        Check("ports", address, lambda address=address: look(address, wanted))  # type: ignore[misc]
        for address in addresses or DEFAULTS
    ]


def look(address: str, wanted: bool) -> Iterator[Row]:
    family, where = parse_address(address)
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(where)
            sock.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                yield _in_use(address, int(where[1]), wanted)
            else:
                found = f"cannot be listened on: {error.strerror or error}"
                yield Row("ports", address, Verdict.PROBLEM, found, "give an address of this machine, and a free port")
            return
    yield Row("ports", address, Verdict.OK, "free")


def _in_use(address: str, port: int, wanted: bool) -> Row:
    pid = listener(port)
    who = f"{command(pid)} (pid {pid})" if pid else "a process that this user cannot see"
    if pid and "kvstrata" in command_line(pid):
        return Row("ports", address, Verdict.OK, f"in use by {who}: kvstrata itself")
    verdict = Verdict.PROBLEM if wanted else Verdict.WARNING
    return Row("ports", address, verdict, f"in use by {who}", "stop it, or give daemons another port (0 picks one)")


def listener(port: int) -> int:
    """The process that listens on a TCP port; 0 when nobody does, or it cannot be seen."""
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir() if inodes else []:
        if process.name.isdigit() and _holds(process, inodes):
            return int(process.name)
    return 0


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return False  # it has ended, or is another user's
    return any(_target(each) in inodes for each in descriptors)


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""  # closed since


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process that has ended since"


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""

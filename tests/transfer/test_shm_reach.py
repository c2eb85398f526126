"""Which nodes shared memory reaches: those of this boot whose socket this user may connect to; others go over TCP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.transfer.base import Endpoint
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.shm import ShmTransport

#: As another user, where this one is root, who may do everything; the modules are read before.
PROBE = """
import os, sys
from kvstrata.transfer.base import Endpoint
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.shm import ShmTransport
transport = ShmTransport(Identity.new())
endpoint = Endpoint("n", 1, "127.0.0.1:1", sys.argv[1], boot_id())
if os.geteuid() == 0:
    os.setuid(65534)
print(transport.reaches(endpoint), os.path.exists(sys.argv[1]))
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket in a directory that everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-test-") as directory:
        Path(directory).chmod(0o755)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(Path(directory) / "node.sock"))
            server.listen()
            yield Path(directory) / "node.sock"


def seen_by_another(path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", PROBE, path], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_a_socket_that_this_user_may_not_connect_to_is_not_reached(path: Path) -> None:
    path.chmod(0o600 if os.geteuid() == 0 else 0)
    assert seen_by_another(path) == "False True"


def test_one_that_it_may_is(path: Path) -> None:
    path.chmod(0o666)
    assert seen_by_another(path) == "True True"


def test_another_boot_and_a_path_that_is_not_there_are_not_reached(path: Path) -> None:
    transport = ShmTransport(Identity.new())
    assert transport.reaches(Endpoint("n", 1, "127.0.0.1:1", str(path), boot_id()))
    assert not transport.reaches(Endpoint("n", 1, "127.0.0.1:1", str(path), "another"))
    assert not transport.reaches(Endpoint("n", 1, "127.0.0.1:1", str(path) + "x", boot_id()))
    assert not transport.reaches(Endpoint("n", 1, "127.0.0.1:1", "", boot_id()))

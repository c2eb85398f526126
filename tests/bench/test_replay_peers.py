"""The replay beside another pool: the same engines use it by its own calls, and what it does not give is not hidden."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import replay_peers
from mooncake_servers import MooncakeServers

from kvstrata.proto.errors import Unavailable

#: Blocks are files; what it is told to break, it breaks.
STORE = """
import ctypes, os, pathlib
HERE = pathlib.Path(__file__).parent
def path(key):
    return HERE / key.replace("/", "_")
class MooncakeDistributedStore:
    def setup(self, host, metadata, segment, buffer, protocol, device, master):
        os.write(2, b"a line of the library\\n")
        return 0
    def register_buffer(self, address, nbytes):
        return 0
    def batch_is_exist(self, keys):
        return [int(path(key).exists()) for key in keys]
    def batch_put_from(self, keys, addresses, sizes):
        codes = []
        for key, address, size in zip(keys, addresses, sizes):
            codes.append(-705 if path(key).exists() else -200 if (HERE / "full").exists() else 0)
            if not codes[-1]:
                path(key).write_bytes(ctypes.string_at(address, size))
        return codes
    def batch_get_into(self, keys, addresses, sizes):
        sizes = list(sizes)
        for at, (key, address) in enumerate(zip(keys, addresses)):
            data = bytearray(path(key).read_bytes())
            data[0] ^= (HERE / "lies").exists()
            ctypes.memmove(address, bytes(data), len(data))
            if (HERE / "loses").exists() and at % 2:
                sizes[at] = -704
        return sizes
    def close(self):
        pass
"""
PROGRAM = """#!{python}
import re, socket, sys, time
port = next(int(flag.split("=")[1]) for flag in sys.argv if re.match("--(rpc_)?port=", flag))
server = socket.create_server(("127.0.0.1", port))
while True:
    server.accept()[0].close()
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Site-packages with something in them that answers as Mooncake does."""
    folder = tmp_path / "packages" / "mooncake"
    folder.mkdir(parents=True)
    (folder / "store.py").write_text(STORE)
    for name in ("mooncake_master", "mooncake_client"):
        (folder / name).write_text(PROGRAM.format(python=sys.executable))
        (folder / name).chmod(0o755)
    return folder.parent


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four sessions of two turns, the second of each longer than the first."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"t": float(turn * 10 + session), "session": str(session), "in": 64 * (4 + 2 * turn), "out": 1, "block": 64,
         "runs": [[100 * session, 100 * session + 3 + 2 * turn]]}
        for turn in range(2) for session in range(4)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def replay(trace: Path, packages: Path, system: str, tmp_path: Path) -> tuple[int, dict[str, Any], str]:
    out = tmp_path / f"{system}.json"
    script = str(Path(replay_peers.__file__))
    command = [sys.executable, script, str(trace), "--mooncake", str(packages), "--pool", system, "--json", str(out)]
    options = ["--engines", "2", "--private-tokens", "0", "--pool-tokens", "65536", "--block-tokens", "64"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, env=env, check=False)
    assert out.exists(), done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert not list(tmp_path.glob("kvstrata-*")), "nothing is left"
    return done.returncode, row, done.stderr


def test_both_are_hit_alike_by_the_same_trace(trace: Path, packages: Path, tmp_path: Path) -> None:
    code, ours, _ = replay(trace, packages, "kvstrata", tmp_path)
    assert code == 0
    _, peer, said = replay(trace, packages, "mooncake-tcp", tmp_path)
    for row in (ours, peer):
        assert row["requests"] == 8 and row["wrong_bytes"] == 0 and row["failed_requests"] == 0
        assert row["hit_rate"] == row["ceiling_rate"] > 0.3 and row["reasons"] == {} and row["faults"] == []
    assert "a line of the library" not in said


def test_what_a_peer_loses_or_breaks_is_counted(trace: Path, packages: Path, tmp_path: Path) -> None:
    (packages / "mooncake" / "loses").touch()
    (packages / "mooncake" / "lies").touch()
    code, row, _ = replay(trace, packages, "mooncake-tcp", tmp_path)
    assert code == 0, "that is a figure, not a fault of the bench"
    assert row["reasons"]["missing"] > 0 and row["hit_rate"] < row["ceiling_rate"] and row["wrong_bytes"] > 0


def test_a_peer_without_room_hits_nothing(trace: Path, packages: Path, tmp_path: Path) -> None:
    (packages / "mooncake" / "full").touch()
    _, row, _ = replay(trace, packages, "mooncake-tcp", tmp_path)
    assert row["hit_rate"] == 0 and set(row["reasons"]) == {"full"}


def test_a_peer_that_does_not_start_is_said(packages: Path) -> None:
    (packages / "mooncake" / "mooncake_master").write_text(f"#!{sys.executable}\nraise SystemExit('no such network')\n")
    with pytest.raises(Unavailable, match=r"mooncake_master .* exited with code 1: no such network"):
        MooncakeServers(packages, 1 << 20)

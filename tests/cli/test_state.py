"""``kvstrata master --state``: a file or a Redis, by flag, variable or file, and no password in sight."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.client.admin import AdminClient
from tests import command_line
from tests.redis_server import RedisServer, needs_redis

FREE = ("--listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-format", "json")
COMMAND = (sys.executable, "-m", "kvstrata.cli.app", "master")
SECRET = "hunter2"

Start = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]


@pytest.fixture(scope="module")
def guarded_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    needs_redis()
    with RedisServer(tmp_path_factory.mktemp("redis"), "appendonly yes", password=SECRET) as server:
        yield server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a master, wait for its ready line; its log is ``log`` in the test's directory."""
    children: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **variables: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        with (tmp_path / "log").open("a") as log:
            child = subprocess.Popen(
                [*COMMAND, *FREE, "--log-level", "debug", *arguments],
                stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **variables},
            )  # fmt: skip
        children.append(child)
        assert child.stdout is not None
        assert select.select([child.stdout], [], [], 30)[0], "no ready line in time"
        return child, json.loads(child.stdout.readline() or "{}")

    yield begin
    for child in children:
        child.terminate()
    for child in children:
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(10)
        assert child.stdout is not None
        child.stdout.close()


def _seen(child: subprocess.Popen[str]) -> str:
    """What ``ps`` shows of it, also to those it does not belong to."""
    return Path(f"/proc/{child.pid}/cmdline").read_text()


@pytest.mark.parametrize("how", ["variable", "password file", "settings file"])
def test_policy_in_redis_outlives_the_master(
    guarded_redis: RedisServer, start: Start, tmp_path: Path, how: str
) -> None:
    bare = f"redis://{guarded_redis.address}/0?cluster={how.replace(' ', '-')}"
    full = bare.replace("redis://", f"redis://:{SECRET}@")
    (tmp_path / "pw").write_text(SECRET + "\n")
    (tmp_path / "settings.yaml").write_text(f"master:\n  state: {full}\n")
    arguments, variables = {
        "variable": ((), {"KVSTRATA_MASTER_STATE": full}),
        "password file": (("--state", bare, "--state-password-file", str(tmp_path / "pw")), {}),
        "settings file": (("--config", str(tmp_path / "settings.yaml")), {}),
    }[how]
    child, ready = start(*arguments, **variables)
    with guarded_redis.client() as client:
        held = client.hget(f"kvstrata:{{{how.replace(' ', '-')}}}:facts", "cluster_id")
    assert ready["cluster_id"] == held.decode()
    assert SECRET not in _seen(child)
    child.kill()
    child.wait(10)
    again, later = start(*arguments, **variables)
    assert later["cluster_id"] == ready["cluster_id"]
    with AdminClient(later["channel"]) as admin:
        assert admin.health() is not None
    again.terminate()
    assert again.wait(15) == 0
    assert SECRET not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--state", f"redis://:{SECRET}@db"), "flags are seen by everybody on this machine"),
        (("--state", f"redis+sentinel://db/kv?sentinel_password={SECRET}"), "flags are seen by everybody"),
        (("--state", "etcd://db"), "unknown scheme etcd://: give the path of a SQLite file, or one of redis://"),
        (("--state", "redis://db?clustre=x"), "unknown option 'clustre'"),
        (("--state-password-file", "pw"), "give a redis:// URL as --state"),
        (("--state", "redis://db", "--state-password-file", "/nowhere/pw"), "cannot read the password in /nowhere/pw"),
    ],
)
def test_what_is_wrong_with_a_state_is_a_usage_error(arguments: tuple[str, ...], says: str) -> None:
    done = command_line.run("master", *FREE, *arguments, env={"COLUMNS": "240"})
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert SECRET not in done.stderr + done.stdout


def test_a_redis_that_does_not_answer_is_an_unreachable_one(guarded_redis: RedisServer, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "gone") as gone:
        gone.kill()
        command = [*COMMAND, *FREE, "--state", f"redis://{gone.address}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and "refused" in done.stderr and "waiting for the state store" in done.stderr

"""A peer's run: what it prints is read, and nothing of it is left, however it ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import suite_peers
from suite_results import Results

from tests.processes import alive

DRIVER = """
import json, mmap, pathlib, os, sys, time
shared, folder, then = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
(folder / "pid").write_text(str(os.getpid()))
with open(shared / "segment", "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
while not (folder / "seen").exists() or then == "stays":
    time.sleep(0.01)
row = {"peer": "p", "op": "get", "batch": 1, "value_size": 65536, "GB_s_med": 1.5, "p50_us_med": 1, "p99_us_med": 2}
print(json.dumps(row | {"version": "1.2.3"}))
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the folder of shared memory."""
    folder = tmp_path / "shm"
    (folder / "a folder").mkdir(parents=True)
    (folder / "older").touch()
    monkeypatch.setattr(suite_peers, "SHARED_MEMORY", folder)
    monkeypatch.setattr(suite_peers, "LOOK_S", 0.05)
    return folder


def test_a_server_that_its_script_forgets_is_ended(tmp_path: Path, shared: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"sleep 600 >/dev/null 2>&1 &\necho $! >{tmp_path}/pid\nexit 1\n")
    assert suite_peers.peer_round(Results(), script, "p", [65536], False) == ""
    deadline = time.monotonic() + 10
    while alive(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(tmp_path: Path, shared: Path, then: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Results, str]:
    """With a driver that ends once its segment was seen, or that stays and will not be asked to end."""
    script = tmp_path / "run.sh"
    script.write_text(f"trap '' TERM\n{sys.executable} {tmp_path}/driver.py {shared} {tmp_path} {then}\n")
    (tmp_path / "driver.py").write_text(DRIVER)
    look = suite_peers._mapped

    def looked(session: int | None = None) -> set[Path]:
        found = look(session)
        if session is not None and found:
            assert found == {shared / "segment"}
            (shared / "of another").touch()
            (tmp_path / "seen").touch()
            if then == "stays":
                monkeypatch.setattr(suite_peers, "RUN_S", 0.0)
                monkeypatch.setattr(suite_peers, "END_S", 0.1)
        return found

    monkeypatch.setattr(suite_peers, "_mapped", looked)
    results = Results()
    return results, suite_peers.peer_round(results, script, "p", [65536], False)


@pytest.mark.parametrize("then", ["ends", "stays"])
def test_nothing_of_a_peer_is_left_and_nothing_of_others_is_taken(
    tmp_path: Path, shared: Path, then: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, version = run(tmp_path, shared, then, monkeypatch)
    assert not alive(int((tmp_path / "pid").read_text())), "neither the script nor what it started"
    assert {path.name for path in shared.iterdir()} == {"older", "of another", "a folder"}
    said = capsys.readouterr().err
    if then == "ends":
        assert version == "1.2.3" and len(results.as_list()) == 1 and said == ""
    else:
        assert version == "" and results.as_list() == [] and "no figures within" in said


def test_a_peer_may_leave_its_version_out() -> None:
    assert suite_peers.version_of(["starting", '{"op": "get"}', '{"op": "put", "version": 7}']) == "7"
    assert suite_peers.version_of(["starting", '{"op": "get"}']) == ""

"""A file that is watched: who asks for its content waits for nobody who reads it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstrata.transfer.security.watched_file import LOOK_S, WatchedFile

SOON_S = 10.0


def test_a_reading_that_hangs_holds_up_nobody_else(tmp_path: Path) -> None:
    path, now = tmp_path / "file", [0.0]
    path.write_text("old")
    reads, go_on = threading.Event(), threading.Event()

    def load() -> str:
        text = path.read_text()
        if text == "newer":
            reads.set()
            assert go_on.wait(SOON_S)
        return text

    file = WatchedFile((path,), load, clock=lambda: now[0])
    path.write_text("newer")
    now[0] += LOOK_S
    with ThreadPoolExecutor(3) as threads:
        try:
            reader = threads.submit(file.current)
            assert reads.wait(SOON_S)
            now[0] += LOOK_S  # long enough for the next one to look, too
            assert threads.submit(file.current).result(SOON_S / 2) == "old"
            waiting = threads.submit(file.refresh)
            assert not waiting.done()
        finally:
            go_on.set()
        assert reader.result(SOON_S) == "newer"
        waiting.result(SOON_S)
    assert file.current() == "newer"

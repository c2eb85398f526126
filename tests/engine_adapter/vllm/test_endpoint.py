"""The lookup socket's place: one an engine, this user's alone, and no litter of killed engines."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.engine_adapter.vllm.endpoint import lookup_endpoint, remove_stale
from kvstrata.proto.errors import InvalidArgument


@pytest.fixture(autouse=True)
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A socket's path has 107 characters at most: pytest's own folders are too deep."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def path_of(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))


def leave(endpoint: str, age_s: float, *, listen: bool = False) -> socket.socket:
    """A socket file, as old as that."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(str(path_of(endpoint)))
    if listen:
        bound.listen()
    when = path_of(endpoint).stat().st_mtime - age_s
    os.utime(path_of(endpoint), (when, when))
    return bound


def test_halves_of_one_engine_meet_and_engines_do_not() -> None:
    assert lookup_endpoint("a") == lookup_endpoint("a") != lookup_endpoint("b")
    assert path_of(lookup_endpoint("a")).parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_enter_is_refused() -> None:
    path_of(lookup_endpoint("a")).parent.chmod(0o755)
    with pytest.raises(InvalidArgument, match="open to other users"):
        lookup_endpoint("a")


def test_a_link_to_a_folder_is_refused(short_folder: Path) -> None:
    folder = path_of(lookup_endpoint("a")).parent
    folder.rename(short_folder / "elsewhere")
    folder.symlink_to(short_folder / "elsewhere")
    with pytest.raises(InvalidArgument, match="open to other users"):
        lookup_endpoint("a")


def test_only_old_sockets_that_nobody_listens_at_are_removed() -> None:
    old, young, live = (lookup_endpoint(name) for name in ("old", "young", "live"))
    leave(old, 3600).close()
    leave(young, 0).close()
    with leave(live, 3600, listen=True):
        assert remove_stale(lookup_endpoint("mine")) == 1
    assert [path_of(endpoint).exists() for endpoint in (old, young, live)] == [False, True, True]

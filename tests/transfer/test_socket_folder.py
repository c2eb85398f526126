"""Sockets of an engine in a folder for temporary files that has a long path."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import zmq

from kvstrata.transfer.socket_folder import PATH_BYTES_MAX, socket_home


@pytest.mark.parametrize("spare", [0, 1, 40])
def test_a_socket_can_be_bound_however_long_the_folder_s_path_is(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    below, short = "lookup", Path(tempfile.mkdtemp(prefix="kv", dir="/tmp"))
    try:
        usual = short / ("t" * (PATH_BYTES_MAX + spare - len(f"{short}//{below}")))
        usual.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(usual))
        home = socket_home(below)
        assert home == (usual if not spare else Path("/tmp"))
        path = home / below if not spare else short / below
        with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
            listener.bind(f"ipc://{path}")
    finally:
        shutil.rmtree(short)

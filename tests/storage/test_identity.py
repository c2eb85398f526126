"""The data directory: one node at a time, one id for ever, a new incarnation each start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.identity import DataDirectory


def test_the_id_stays_and_the_incarnation_grows(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        directory = DataDirectory(tmp_path / "node")
        seen.append(directory.identity)
        directory.close()
        directory.close()
    assert len({identity.node_id for identity in seen}) == 1
    assert [identity.incarnation >> 32 for identity in seen] == [1, 2, 3]


def test_two_directories_are_two_nodes(tmp_path: Path) -> None:
    first, second = DataDirectory(tmp_path / "a"), DataDirectory(tmp_path / "b")
    assert first.identity.node_id != second.identity.node_id
    first.close()
    second.close()


def test_a_directory_in_use_says_by_whom(tmp_path: Path) -> None:
    first = DataDirectory(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        DataDirectory(tmp_path)
    first.close()
    DataDirectory(tmp_path).close()


def test_a_name_is_kept_and_another_one_refused(tmp_path: Path) -> None:
    DataDirectory(tmp_path, "rack-7").close()
    unnamed = DataDirectory(tmp_path)
    assert unnamed.identity.node_id == "rack-7"
    unnamed.close()
    with pytest.raises(ConfigError, match="rack-7"):
        DataDirectory(tmp_path, "rack-8")
    DataDirectory(tmp_path, "rack-7").close()
    with pytest.raises(ConfigError, match="node name"):
        DataDirectory(tmp_path / "other", "../etc")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format":2,"node_id":"a","starts":1}', '{"format":1,"node_id":5,"starts":1}']
)
def test_a_damaged_or_newer_identity_is_not_overwritten(tmp_path: Path, text: str) -> None:
    (tmp_path / "identity.json").write_text(text)
    with pytest.raises(ConfigError, match=r"identity\.json"):
        DataDirectory(tmp_path)
    assert (tmp_path / "identity.json").read_text() == text


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="data directory"):
        DataDirectory(tmp_path / "file")


def test_more_memory_than_there_is_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    config = StorageConfig((), "127.0.0.1:0", "127.0.0.1:0", tmp_path, 1 << 50)
    with pytest.raises(ConfigError, match="choose a smaller --dram"):
        config.validated()
    with pytest.raises(ConfigError, match="HOST:PORT"):
        StorageConfig(("nowhere",), "127.0.0.1:0", "127.0.0.1:0", tmp_path, 1 << 20).validated()

"""What outlives a restart: whole, or refused with what to do."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import xxhash

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.status import Tier
from kvstrata.storage.eviction.quotas import NodeShare, QuotaBook
from kvstrata.storage.masters.policies import Policies, PolicyFile

KEPT = Policies({"salts": [["über", 5]], "fallback": None}, {"model": 3, "": 1})


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path)
    assert file.load() is None
    file.save(Policies({"old": 1}))
    file.save(KEPT)
    assert PolicyFile(tmp_path).load() == KEPT
    assert [each.name for each in tmp_path.iterdir()] == ["policies.json"]


def test_any_flipped_byte_and_any_truncation_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path)
    file.save(KEPT)
    whole = file.path.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :] for at in range(len(whole))]
    damaged += [whole[:at] for at in range(len(whole))] + [whole + b" "]
    for content in damaged:
        file.path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"policies\.json"):
            file.load()
        assert file.path.read_bytes() == content


def test_another_format_names_the_newer_version(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path)
    file.path.write_text('{"format": 2, "bytes": 0, "xxh3": "0"}\n')
    with pytest.raises(ConfigError, match=r"format 2.*newer"):
        file.load()


@pytest.mark.parametrize(
    "body", ["[]", '{"quotas": 3, "epochs": {}}', '{"quotas": null}', '{"quotas": null, "epochs": {"g": "1"}}', "{"]
)
def test_a_sound_checksum_does_not_make_nonsense_right(tmp_path: Path, body: str) -> None:
    file = PolicyFile(tmp_path)
    head = {"format": 1, "bytes": len(body), "xxh3": xxhash.xxh3_64_hexdigest(body.encode())}
    file.path.write_text(json.dumps(head) + "\n" + body)
    with pytest.raises(ConfigError, match="move it away"):
        file.load()


def test_a_write_that_fails_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PolicyFile(tmp_path)
    file.save(KEPT)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        file.save(Policies({}))
    assert PolicyFile(tmp_path).load() == KEPT


def test_shares_that_are_none_are_refused_too(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path)
    assert file.restored()[0].shares() == []
    file.save(Policies({"format": 1, "shares": {"a": {"dram_limit": -1}}}))
    with pytest.raises(ConfigError, match=r"policies\.json.*move it away"):
        file.restored()
    book = QuotaBook()
    book.apply([NodeShare("a", 5, None, 1)], [], True, NodeShare("", 7), 30.0, 0.0, revision=4)
    file.save(Policies(book.to_json(), {"g": 2}))
    kept, epochs = file.restored()
    assert (kept.shares(), kept.revision, epochs) == (book.shares(), 4, {"g": 2})
    assert kept.limit(Tier.DRAM, "another", 0.0) == 7

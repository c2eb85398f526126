"""What outlives a restart: whole, or refused with what to do."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest
import xxhash

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import ConfigError
from kvstrata.proto.status import Tier
from kvstrata.storage.eviction.quotas import NodeShare, QuotaBook
from kvstrata.storage.masters.commands import Commands
from kvstrata.storage.masters.policies import Policies, PolicyFile
from kvstrata.storage.masters.policy_copy import PolicyCopy

from .conftest import Node

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


def test_the_copy_of_policies_outlives_the_process(node: Node, tmp_path: Path) -> None:
    file = PolicyFile(tmp_path)
    assert file.copy() == PolicyCopy()
    lock = threading.Lock()
    commands = Commands(node.state, lock, file)
    row = control.PolicyRow(kind="policies", name="über\0", value="{}")
    other = control.PolicyRow(kind="replicas", name="x", value="1")
    whole = control.PolicyCopy(cluster_id="c", as_of=3, whole=True, rows=[row, other])
    commands.attached(control.AttachOk(policy=whole))
    gone = control.PolicyRow(kind="replicas", name="x")
    commands.keep(control.PolicyCopy(cluster_id="c", as_of=9, rows=[gone]))
    commands.turn()
    kept = Commands(node.state, lock, file).copy
    assert kept == PolicyCopy("c", 9, {("policies", "über\0"): "{}"})
    assert kept.message() == control.PolicyCopy(cluster_id="c", as_of=9, whole=True, rows=[row])


def test_a_leader_that_gives_no_copy_has_the_old_one_forgotten(node: Node, tmp_path: Path) -> None:
    """What it orders is in none, and so what is there grows old."""
    file = PolicyFile(tmp_path)
    commands = Commands(node.state, threading.Lock(), file)
    commands.keep(control.PolicyCopy(cluster_id="c", as_of=9, whole=True))
    commands.attached(control.AttachOk())
    commands.turn()
    assert commands.copy.message() is None and file.copy() == PolicyCopy()


@pytest.mark.parametrize(
    "copy", [{}, {"cluster_id": "c", "as_of": -1, "rows": []}, {"cluster_id": "c", "as_of": 1, "rows": [["a", "b"]]}]
)
def test_a_copy_of_policies_that_is_none_is_refused(tmp_path: Path, copy: dict[str, object]) -> None:
    file = PolicyFile(tmp_path)
    file.save(Policies({}, copy=copy))
    with pytest.raises(ConfigError, match=r"policies\.json.*move it away"):
        file.copy()

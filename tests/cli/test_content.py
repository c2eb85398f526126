"""``namespace``, ``block`` and ``why`` as an operator types them, on a real pool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstrata.cli.app import app
from kvstrata.client import Client, PoolNamespace
from kvstrata.client.admin import AdminClient
from kvstrata.proto.errors import FingerprintMismatch, InvalidArgument
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

SIZE = 4096


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.end()


@pytest.fixture
def client(pool: RealPool) -> Iterator[Client]:
    with Client(pool.address, transfer_deadline_ms=10_000) as client:
        yield client


class Stored:
    """``count`` blocks of ``salt`` in a namespace of this test's own."""

    def __init__(self, client: Client, group: str, count: int, salt: str = "", width: int = 16) -> None:
        self.client, self.group, self.salt = client, group, salt
        self.ns: PoolNamespace = client.namespace(group, block_bytes=SIZE, block_tokens=16, hash_bytes=width)
        self.hashes = keys(count, f"{group}/{salt}", width)
        rows = client.register(payload(self.hashes, salt, SIZE, width)).rows(self.ns)
        assert client.store(self.ns, salt, self.hashes, rows).stored.all()
        until(lambda: self.hits() == count)

    def hits(self) -> int:
        return self.client.lookup(self.ns, self.salt, self.hashes).hit_blocks or 0


def kvstrata(pool: RealPool, *arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, [*arguments, "--master", pool.address], input=typed or None)


def answer(pool: RealPool, *arguments: str) -> object:
    done = kvstrata(pool, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_bump_is_seen_by_everybody_and_the_older_handle_is_told(pool: RealPool, client: Client) -> None:
    at = Stored(client, "bump/model", 3)
    done = kvstrata(pool, "namespace", "bump", "bump/mo")
    assert done.exit_code == 0 and "bump/model is at weight epoch 1; 3 older blocks are misses" in done.stdout
    assert at.hits() == 0
    rows = client.register(payload(at.hashes, "", SIZE)).rows(at.ns)
    assert not client.load(at.ns, "", at.hashes, rows).loaded.any()
    with pytest.raises(FingerprintMismatch, match="open the namespace again"):
        client.store(at.ns, "", at.hashes, rows)
    again = client.namespace("bump/model", block_bytes=SIZE, block_tokens=16)
    assert client.store(again, "", at.hashes, rows).stored.all()
    assert client.load(again, "", at.hashes, rows).loaded.all()
    listed = [row for row in answer(pool, "namespace", "list") if row["spec"]["group"] == "bump/model"]  # type: ignore[attr-defined]
    assert [row["epoch"] for row in listed] == [1]
    assert "bump/model" in kvstrata(pool, "namespace", "list").stdout


def test_a_name_that_fits_none_or_several_is_refused_with_the_names(pool: RealPool, client: Client) -> None:
    Stored(client, "names/a", 1), Stored(client, "names/b", 1)
    several = kvstrata(pool, "namespace", "bump", "names/")
    assert several.exit_code == 2 and "names/a, names/b" in several.stderr
    none = kvstrata(pool, "block", "stat", "--namespace", "nobody")
    assert none.exit_code == 2 and "no namespace begins with 'nobody'" in none.stderr


def test_a_namespace_is_dropped_by_tenant_and_whole_after_a_yes(pool: RealPool, client: Client) -> None:
    mine, theirs = Stored(client, "drop/x", 3, "mine"), Stored(client, "drop/x", 2, "theirs")
    refused = kvstrata(pool, "namespace", "drop", "drop/x")
    assert refused.exit_code == 2 and "--yes" in refused.stderr and mine.hits() == 3
    assert answer(pool, "namespace", "drop", "drop/x", "--dry-run")["blocks"] == 5  # type: ignore[index]
    assert mine.hits() == 3 and theirs.hits() == 2
    gone = kvstrata(pool, "namespace", "drop", "drop/x", "--tenant", "mine", "--yes")
    assert gone.exit_code == 0 and "3 blocks are gone: namespace drop/x, tenant mine" in gone.stdout
    assert mine.hits() == 0 and theirs.hits() == 2
    assert answer(pool, "namespace", "drop", "drop/x", "--yes")["blocks"] == 2  # type: ignore[index]
    assert theirs.hits() == 0


def test_blocks_are_counted_listed_and_removed_by_their_hash(pool: RealPool, client: Client) -> None:
    at, other = Stored(client, "blocks/x", 4), Stored(client, "blocks/x", 1, "other")
    stat = answer(pool, "block", "stat", "--namespace", "blocks/x", "--tenant", "")
    assert stat["blocks"] == 4 and stat["namespaces"][0]["block_bytes"] == SIZE  # type: ignore[index]
    listed = answer(pool, "block", "list", "--namespace", "blocks/x", "--tenant", "")
    assert {row["hash"] for row in listed["blocks"]} == {at.hashes[i : i + 16].hex() for i in range(0, 64, 16)}  # type: ignore[index]
    name = at.hashes[16:32].hex()
    table = kvstrata(pool, "block", "list", "--hash", name[:12], "--namespace", "blocks/x")
    assert name in table.stdout and "(empty)" in table.stdout and "1 of 1" in table.stdout
    gone = kvstrata(pool, "block", "remove", "--hash", name[:12], "--namespace", "blocks/x", "--yes")
    assert gone.exit_code == 0 and "1 blocks are gone" in gone.stdout
    assert client.exists(at.ns, "", at.hashes).tolist() == [True, False, True, True]
    assert kvstrata(pool, "block", "remove", "--tenant", "other", "--yes").exit_code == 0
    assert other.hits() == 0 and at.hits() == 1


def test_longer_hashes_are_removed_by_their_whole_name_only(pool: RealPool, client: Client) -> None:
    at = Stored(client, "long/x", 2, width=32)
    folded = answer(pool, "block", "list", "--namespace", "long/x")["blocks"][0]["hash"]  # type: ignore[index]
    refused = kvstrata(pool, "block", "remove", "--hash", folded, "--namespace", "long/x", "--yes")
    assert refused.exit_code == 2 and "give the whole hash" in refused.stderr and at.hits() == 2
    gone = kvstrata(pool, "block", "remove", "--hash", at.hashes[32:].hex(), "--yes")
    assert gone.exit_code == 0 and at.hits() == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["--all", "--tenant", "x"], ["--hash", "zz"], ["--hash", "abc"], ["--hash", "ab", "--erase"]],
)
def test_removals_that_say_too_little_or_too_much_are_refused(pool: RealPool, arguments: list[str]) -> None:
    assert kvstrata(pool, "block", "remove", "--yes", *arguments).exit_code == 2


def test_all_of_it_goes_only_after_a_yes(pool: RealPool, client: Client) -> None:
    at = Stored(client, "all/x", 2)
    refused = kvstrata(pool, "block", "remove", "--all", typed="y\n")
    assert refused.exit_code == 2 and "EVERY block of EVERY tenant" in refused.stderr, "a pipe is no terminal"
    assert at.hits() == 2
    assert kvstrata(pool, "block", "remove", "--all", "--yes").exit_code == 0
    assert at.hits() == 0


def test_why_answers_for_requests_and_for_hashes(pool: RealPool, client: Client) -> None:
    at = Stored(client, "why/x", 3, "t")
    absent = keys(1, "nobody")
    client.lookup(at.ns, "t", at.hashes + absent, request="chat-1")
    by_request = answer(pool, "why", "chat-1")
    assert (by_request["asked"], by_request["hit"], by_request["verdict"]) == (4, 3, "never_stored")  # type: ignore[index]
    assert by_request["hash"] == absent.hex()  # type: ignore[index]
    said = kvstrata(pool, "why", at.hashes[:16].hex())
    assert said.exit_code == 0 and said.stdout.startswith("present") and "tenant t" in said.stdout
    client.remove(at.ns, "t", at.hashes[:16])
    narrowed = answer(pool, "why", at.hashes[:16].hex(), "--tenant", "t", "--namespace", "why/x")
    assert narrowed["verdict"] == "removed" and narrowed["story"]  # type: ignore[index]
    unknown = kvstrata(pool, "why", "chat-2")
    assert unknown.exit_code == 2 and "chat-2" in unknown.stderr
    assert kvstrata(pool, "why", "chat-1", "--tenant", "t").exit_code == 2
    hexadecimal = "ab" * 16
    client.lookup(at.ns, "t", absent, request=hexadecimal)
    assert answer(pool, "why", hexadecimal)["asked"] == 1, "a request may be called like a hash"  # type: ignore[index]


def test_a_quota_is_set_held_and_shown(pool: RealPool, client: Client) -> None:
    done = kvstrata(pool, "tenant", "set", "small", "--dram", "32KiB", "--dram-floor", "8KiB")
    assert done.exit_code == 0 and "tenant small: dram 32KiB (floor 8KiB), ssd none" in done.stdout
    ns = client.namespace("quota/x", block_bytes=SIZE, block_tokens=16)
    for chain in ("a", "b"):
        hashes = keys(6, chain)
        client.store(ns, "small", hashes, client.register(payload(hashes, "small", SIZE)).rows(ns))

    def used() -> int:
        return int(answer(pool, "tenant", "get", "small")["dram_bytes"])  # type: ignore[index]

    until(lambda: used() == 32 << 10)
    row = answer(pool, "tenant", "get", "small")
    assert row["policy"]["dram_limit"] == 32 << 10 and row["nodes"]  # type: ignore[index]
    assert kvstrata(pool, "tenant", "set", "small", "--dram-floor", "64KiB").exit_code == 2, "above its limit"
    huge = kvstrata(pool, "tenant", "set", "small", "--dram", "none", "--dram-floor", "1TiB")
    assert huge.exit_code == 2 and str(1 << 40) in huge.stderr
    assert "small" in kvstrata(pool, "tenant", "export").stdout
    gone = kvstrata(pool, "tenant", "rm", "small", "--drop-blocks", "--yes")
    assert gone.exit_code == 0 and "8 blocks are gone" in gone.stdout


def test_the_admin_client_says_what_is_wrong(pool: RealPool) -> None:
    with AdminClient(pool.address) as admin:
        with pytest.raises(InvalidArgument):
            admin.bump_epoch("no such group")
        with pytest.raises(InvalidArgument):
            admin.explain(request="nobody asked")


def test_nobody_there_is_3(tmp_path: Path) -> None:
    for arguments in (["tenant", "list"], ["namespace", "list"], ["block", "stat"], ["why", "x"]):
        done = CliRunner().invoke(app, [*arguments, "--master", "127.0.0.1:1"])
        assert done.exit_code == 3 and "no master at" in done.stderr

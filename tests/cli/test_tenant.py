"""``kvstrata tenant`` as an operator types it: only what is given changes, nothing goes without a yes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvstrata.cli.app import app
from kvstrata.client.admin import AdminClient
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import InvalidArgument, Refused
from tests.cli.fake_tenants import FakeTenants

GIB = 1 << 30


@pytest.fixture
def master() -> Iterator[FakeTenants]:
    master = FakeTenants()
    yield master
    master.stop()


def tenant(master: FakeTenants, *arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, ["tenant", *arguments, "--master", master.address], input=typed)


def answer(master: FakeTenants, *arguments: str) -> Any:
    done = tenant(master, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def limits(policy: control.TenantPolicy) -> tuple[int | None, int | None, int, int]:
    dram = policy.dram_limit if policy.HasField("dram_limit") else None
    ssd = policy.ssd_limit if policy.HasField("ssd_limit") else None
    return dram, ssd, policy.dram_floor, policy.ssd_floor


# -------------------------------------------------------------------- set


def test_set_changes_what_is_given_and_nothing_else(master: FakeTenants) -> None:
    done = tenant(master, "set", "a", "--dram", "200GiB", "--ssd", "2TiB", "--dram-floor", "20GiB")
    assert done.exit_code == 0 and "now: tenant a: dram 200GiB (floor 20GiB), ssd 2TiB" in done.stdout
    assert limits(master.policies["a"]) == (200 * GIB, 2048 * GIB, 20 * GIB, 0)
    assert tenant(master, "set", "a", "--dram", "none").exit_code == 0
    assert limits(master.policies["a"]) == (None, 2048 * GIB, 20 * GIB, 0)
    assert tenant(master, "set", "a", "--ssd-floor", "5", "--dram-floor", "0").exit_code == 0
    assert limits(master.policies["a"]) == (None, 2048 * GIB, 0, 5)


def test_a_tenant_without_a_policy_starts_from_what_applied_to_it(master: FakeTenants) -> None:
    assert tenant(master, "set", "--default", "--dram", "10GiB").exit_code == 0
    assert limits(master.fallback) == (10 * GIB, None, 0, 0)
    tenant(master, "set", "new", "--ssd", "1TiB")
    assert limits(master.policies["new"]) == (10 * GIB, 1024 * GIB, 0, 0)
    assert tenant(master, "set", "--default", "--deny").exit_code == 0 and master.denies
    tenant(master, "set", "other", "--dram", "1GiB")
    assert limits(master.policies["other"]) == (GIB, 0, 0, 0), "nothing was allowed before"
    assert tenant(master, "set", "--default", "--dram", "none").exit_code == 0 and not master.denies


def test_the_empty_salt_is_named_by_an_empty_word(master: FakeTenants) -> None:
    done = tenant(master, "set", "", "--dram", "1GiB")
    assert done.exit_code == 0 and "tenant (empty)" in done.stdout and list(master.policies) == [""]
    assert answer(master, "get", "")["policy"]["salt"] == ""
    assert "(empty)" in tenant(master, "list").stdout


def test_a_dry_run_changes_nothing(master: FakeTenants) -> None:
    done = tenant(master, "set", "a", "--dram", "1GiB", "--dry-run")
    assert done.exit_code == 0 and "would be: tenant a" in done.stdout and not master.policies
    master.warnings = ["no node has an SSD"]
    assert "warning: no node has an SSD" in tenant(master, "set", "a", "--ssd", "1", "--dry-run").stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["a"],
        ["--dram", "1GiB"],
        ["a", "--default", "--dram", "1GiB"],
        ["a", "--dram", "-1"],
        ["a", "--dram", "nan"],
        ["a", "--dram-floor", "none"],
        ["a", "--deny"],
        ["--default", "--deny", "--dram", "1"],
    ],
)
def test_what_cannot_be_meant_is_refused(master: FakeTenants, arguments: list[str]) -> None:
    done = tenant(master, "set", *arguments)
    assert done.exit_code == 2 and "set a" not in master.calls and "set default" not in master.calls


def test_what_the_master_refuses_is_said_with_its_numbers(master: FakeTenants) -> None:
    done = tenant(master, "set", "a", "--dram-floor", "101GiB")
    assert done.exit_code == 2 and f"floors of {101 * GIB} do not fit" in done.stderr


# -------------------------------------------------------------------- list, get


def test_a_tenant_in_full(master: FakeTenants) -> None:
    usage = control.TenantUsage(salt="a", dram_bytes=3 * GIB, ssd_bytes=GIB)
    share = control.Share(salt="a", dram_limit=4 * GIB)
    master.rows["a"] = control.TenantRow(
        dram_bytes=3 * GIB,
        ssd_bytes=GIB,
        blocks=7,
        blocks_asked=200,
        blocks_hit=50,
        sampled=99,
        nodes=[control.TenantNode(node_id="n1", usage=usage, share=share, confirmed=True)],
        what_if=[control.WhatIf(factor=0.5, bytes=2 * GIB, hit_rate=0.125)],
    )
    said = tenant(master, "get", "a").stdout
    for part in ("25.0%", "n1", "4GiB", "no limit", "0.5x", "12.5%", "99 sampled", "none of its own"):
        assert part in said, part
    got = answer(master, "get", "a")
    assert got["policy"]["dram_limit"] is None and got["nodes"][0]["share"]["dram_limit"] == 4 * GIB
    assert got["what_if"][0]["hit_rate"] == 0.125 and got["defined"] is False


@pytest.mark.parametrize("command", [["list"], ["get", "a"]])
def test_a_floor_without_room_is_said(master: FakeTenants, command: list[str]) -> None:
    master.rows["a"] = control.TenantRow(ssd_floor_unmet=3 * GIB)
    master.rows["b"] = control.TenantRow()
    said = tenant(master, *command).stderr
    assert said.splitlines() == ["warning: a: 3GiB of its ssd floor have no room on the nodes that are here"]
    assert answer(master, "get", "a")["ssd_floor_unmet"] == 3 * GIB


def test_a_salt_cannot_paint_on_the_terminal_or_turn_into_a_number(master: FakeTenants) -> None:
    for salt in ("[bold red]x[/]", "\x1b[2Jx", "007"):
        master.rows[salt] = control.TenantRow(blocks=1)
    said = tenant(master, "list").stdout
    assert "[bold red]x[/]" in said and "\x1b" not in said and "\\x1b[2Jx" in said
    assert {row["policy"]["salt"] for row in answer(master, "list")["tenants"]} == set(master.rows)


# -------------------------------------------------------------------- rm


def test_rm_leaves_blocks_unless_told_and_confirmed(master: FakeTenants) -> None:
    tenant(master, "set", "a", "--dram", "1GiB")
    master.blocks["a"] = 12
    assert tenant(master, "rm", "a", "--drop-blocks", "--dry-run").stdout.count("12 blocks would go") == 1
    refused = tenant(master, "rm", "a", "--drop-blocks", typed="y\n")
    assert refused.exit_code == 2 and "--yes" in refused.stderr and "a" in master.policies and master.blocks
    done = tenant(master, "rm", "a")
    assert done.exit_code == 0 and "a" not in master.policies and master.blocks == {"a": 12}
    assert tenant(master, "rm", "a", "--erase").exit_code == 2
    master.unreached = ["n9"]
    part = tenant(master, "rm", "a", "--drop-blocks", "--yes")
    assert part.exit_code == 1 and "n9" in part.stderr and not master.blocks, "a script must not take it for done"


# -------------------------------------------------------------------- export, import


def test_what_is_exported_is_imported_elsewhere(master: FakeTenants, tmp_path: Path) -> None:
    for arguments in (["a", "--dram", "1GiB", "--ssd", "1536MiB"], ["", "--dram-floor", "7"], ["--default", "--deny"]):
        assert tenant(master, "set", *arguments).exit_code == 0
    file = tmp_path / "tenants.yaml"
    assert tenant(master, "export", "-o", str(file)).exit_code == 0
    assert tenant(master, "export").stdout == file.read_text()
    other = FakeTenants()
    try:
        done = tenant(other, "import", str(file), "--yes")
        assert done.exit_code == 0 and "3 changed" in done.stdout
        assert other.policies == master.policies and other.denies
        assert "nothing changes" in tenant(other, "import", str(file)).stdout
    finally:
        other.stop()


def test_an_import_shows_what_changes_and_asks(master: FakeTenants, tmp_path: Path) -> None:
    tenant(master, "set", "kept", "--dram", "1GiB")
    tenant(master, "set", "changed", "--dram", "1GiB")
    text = "tenants: {changed: {dram: 2GiB}}"
    dry = tenant(master, "import", "-", "--dry-run", typed=text)
    assert dry.exit_code == 0 and "2GiB" in dry.stdout and "kept" not in dry.stdout
    file = tmp_path / "t.yaml"
    file.write_text(text)
    refused = tenant(master, "import", str(file))
    assert refused.exit_code == 2 and "--yes" in refused.stderr
    assert limits(master.policies["changed"])[0] == GIB
    assert tenant(master, "import", str(file), "--prune", "--yes").exit_code == 0
    assert list(master.policies) == ["changed"] and limits(master.policies["changed"])[0] == 2 * GIB


def test_floors_move_from_one_tenant_to_another_in_one_import(master: FakeTenants) -> None:
    tenant(master, "set", "z", "--dram-floor", "90GiB")
    done = tenant(master, "import", "-", "--yes", typed="tenants: {a: {dram-floor: 80GiB}, z: {dram-floor: 10GiB}}")
    assert done.exit_code == 0, done.output
    part = tenant(
        master, "import", "-", "--yes", typed="tenants: {b: {dram: 1}, c: {dram-floor: 90GiB}, d: {dram-floor: 95GiB}}"
    )
    assert part.exit_code == 2 and "1 of 3 were changed; c was refused" in part.stderr and "b" in master.policies


def test_a_master_that_does_not_know_the_call_is_older(master: FakeTenants) -> None:
    with AdminClient(master.address) as admin:
        with pytest.raises(Refused, match="older than this client"):
            admin.bump_epoch("g")
        with pytest.raises(InvalidArgument, match="do not fit"):
            admin.set_tenant(control.TenantPolicy(salt="a", dram_floor=101 * GIB))

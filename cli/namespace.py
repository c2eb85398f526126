"""``kvstrata namespace ...``: models in the pool, their weight epochs, and what they hold."""

from __future__ import annotations

from itertools import groupby

import typer

from kvstrata.cli.as_json import as_dict, rows
from kvstrata.cli.confirm import Yes, confirm
from kvstrata.cli.dropped import WAIT_S, DryRun, Erase, Wait, end_of, say_dropped
from kvstrata.cli.groups import Group, find_group, shards_of
from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask
from kvstrata.cli.output import expected_errors, print_json, print_table, say
from kvstrata.cli.salts import Tenant, shown
from kvstrata.cli.sizes import format_size

namespace = typer.Typer(help="Namespaces: what is interchangeable, by model.", no_args_is_help=True)


@namespace.command("list")
def list_(master: Master = DEFAULT_MASTER, as_json: Json = False) -> None:
    """Every group of shards: weight epoch, layout, blocks, tenants."""
    with expected_errors():
        with ask(master) as admin:
            found = shards_of(admin.namespaces(), "")
        if as_json:
            print_json(rows(found))
            return
        table = []
        for group, members in groupby(found, key=lambda row: row.spec.group):
            shards = list(members)
            spec = shards[0].spec
            table.append(
                (
                    group,
                    shards[0].epoch,
                    spec.shard_count,
                    format_size(spec.block_bytes),
                    spec.block_tokens,
                    sum(row.blocks for row in shards),
                    format_size(sum(row.blocks * row.spec.block_bytes for row in shards)),
                    max(row.salts for row in shards),
                )
            )
        columns = ("group", "epoch", "shards", "block", "tokens", "blocks", "bytes", "tenants")
        print_table("namespaces", columns, table)


@namespace.command()
def bump(group: Group, wait: Wait = WAIT_S, master: Master = DEFAULT_MASTER, as_json: Json = False) -> None:
    """The model's weights have changed: all that was computed with older ones is a miss from now on.

    Engines that hold the namespace find nothing and store nothing until they open it again. Exits 1 when a node has
    not confirmed within --wait.
    """
    with expected_errors():
        with ask(master) as admin:
            name = find_group(admin, group)
            dropped = admin.bump_epoch(name, wait_s=wait)
        if as_json:
            print_json(as_dict(dropped))
        else:
            say(f"{name} is at weight epoch {dropped.epoch}; {dropped.blocks} older blocks are misses")
        end_of(dropped.unreached)


@namespace.command()
def drop(
    group: Group,
    tenant: Tenant = None,
    erase: Erase = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = WAIT_S,
    master: Master = DEFAULT_MASTER,
    as_json: Json = False,
) -> None:
    """Remove all blocks of a namespace, durably, from every node and tier."""
    with expected_errors(), ask(master) as admin:
        name = find_group(admin, group)
        what = f"namespace {name}" + ("" if tenant is None else f", tenant {shown(tenant)}")
        if not dry_run and not yes:
            would = admin.drop(name, tenant, dry_run=True)
            confirm(f"{would.blocks} blocks will be removed: {what}", yes=yes)
        dropped = admin.drop(name, tenant, erase=erase, dry_run=dry_run, wait_s=wait)
        say_dropped(dropped, what, dry_run=dry_run, as_json=as_json)

"""``kvstrata block ...``: blocks by tenant, namespace and hash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.as_json import as_dict
from kvstrata.cli.confirm import Yes, confirm
from kvstrata.cli.dropped import WAIT_S, DryRun, Erase, Wait, end_of, say_dropped
from kvstrata.cli.groups import GroupOption, find_optional, shards_of
from kvstrata.cli.hashes import parse_prefix
from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask
from kvstrata.cli.output import expected_errors, print_json, print_table, say
from kvstrata.cli.salts import Tenant, shown
from kvstrata.cli.sizes import format_size, value_flag
from kvstrata.proto.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstrata.client.admin import AdminClient

block = typer.Typer(help="Blocks of KV in the pool.", no_args_is_help=True)

Hash = Annotated[
    bytes | None,
    value_flag(parse_prefix, "HEX", "--hash", help="Of blocks whose hash begins so.", show_default=False),
]


@block.command()
def stat(
    tenant: Tenant = None, group: GroupOption = None, master: Master = DEFAULT_MASTER, as_json: Json = False
) -> None:
    """How many blocks there are, by namespace; those of every shard count."""
    with expected_errors():
        with ask(master) as admin:
            found = shards_of(admin.namespaces(), find_optional(admin, group))
            specs = {row.spec.group: row.spec for row in found}
            counts = {name: admin.list_blocks(name, tenant, limit=1).total for name in specs}
        table = [
            {"group": name, "shards": spec.shard_count, "block_bytes": spec.block_bytes, "blocks": counts[name]}
            for name, spec in specs.items()
        ]
        if as_json:
            print_json({"blocks": sum(counts.values()), "namespaces": table})
            return
        say(f"{sum(counts.values())} blocks" + ("" if tenant is None else f" of tenant {shown(tenant)}"))
        lines = [
            (name, spec.shard_count, format_size(spec.block_bytes), counts[name],
             format_size(counts[name] * spec.block_bytes))
            for name, spec in specs.items()
        ]  # fmt: skip
        print_table("by namespace", ("group", "shards", "block", "blocks", "bytes"), lines)


@block.command("list")
def list_(
    tenant: Tenant = None,
    group: GroupOption = None,
    hash_prefix: Hash = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 100,
    master: Master = DEFAULT_MASTER,
    as_json: Json = False,
) -> None:
    """Blocks with where they are. Hashes longer than 16 bytes are shown as the master knows them: folded."""
    from kvstrata.cli.block_removal import folded

    with expected_errors():
        with ask(master) as admin:
            name = find_optional(admin, group)
            listed = admin.list_blocks(name, tenant, hash_prefix=folded(hash_prefix or b""), limit=limit)
        if as_json:
            print_json(as_dict(listed))
            return
        table = [(row.group, row.shard, shown(row.salt), row.hash.hex(), " ".join(row.where)) for row in listed.blocks]
        print_table("blocks", ("group", "shard", "tenant", "hash", "where"), table)
        say(f"{len(listed.blocks)} of {listed.total}")


@block.command()
def remove(
    tenant: Tenant = None,
    group: GroupOption = None,
    hash_prefix: Hash = None,
    everything: Annotated[bool, typer.Option("--all", help="Every block of every tenant.")] = False,
    erase: Erase = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = WAIT_S,
    master: Master = DEFAULT_MASTER,
    as_json: Json = False,
) -> None:
    """Remove blocks for good, from every node and tier. Exits 1 when a node has not confirmed within --wait."""
    with expected_errors():
        narrowed = any(part is not None for part in (tenant, group, hash_prefix))
        if everything == narrowed:
            raise InvalidArgument("say what to remove: --tenant, --namespace, --hash, or --all of it")
        if erase and hash_prefix is not None:
            raise InvalidArgument("--erase works on tenants and namespaces, not on single hashes")
        with ask(master) as admin:
            name = find_optional(admin, group)
            what = _what(tenant, name, hash_prefix)
            if hash_prefix is None:
                if not dry_run and not yes:
                    would = admin.drop(name, tenant, dry_run=True)
                    confirm(f"{would.blocks} blocks will be removed: {what}", yes=yes)
                dropped = admin.drop(name, tenant, erase=erase, dry_run=dry_run, wait_s=wait)
                say_dropped(dropped, what, dry_run=dry_run, as_json=as_json)
            else:
                _remove_hashes(admin, name, tenant, hash_prefix, what, dry_run, yes, wait, as_json)


def _remove_hashes(
    admin: AdminClient,
    group: str,
    tenant: str | None,
    prefix: bytes,
    what: str,
    dry_run: bool,
    yes: bool,
    wait_s: float,
    as_json: bool,
) -> None:
    from kvstrata.cli.block_removal import Removal

    removal = Removal(admin, group, tenant, prefix)
    count = removal.count()
    if not dry_run:
        confirm(f"{count} blocks will be removed: {what}", yes=yes)
        count = removal.run(wait_s)
    unreached = sorted(removal.unreached)
    if as_json:
        print_json({"blocks": count, "unreached": unreached})
    else:
        say(f"{count} blocks {'would go' if dry_run else 'are gone'}: {what}")
    end_of(unreached)


def _what(tenant: str | None, group: str, prefix: bytes | None) -> str:
    parts = []
    if tenant is not None:
        parts.append(f"tenant {shown(tenant)}")
    if group:
        parts.append(f"namespace {group}")
    if prefix is not None:
        parts.append(f"hash {prefix.hex()}")
    return ", ".join(parts) or "EVERY block of EVERY tenant"

"""``kvstrata tenant ...``: who may use how much, and who does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.as_json import as_dict
from kvstrata.cli.confirm import Yes, confirm
from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask
from kvstrata.cli.output import expected_errors, print_json, print_table, say
from kvstrata.cli.salts import shown
from kvstrata.cli.sizes import parse_size, value_flag
from kvstrata.cli.tenant_policy import NOTHING, Limit, Policy
from kvstrata.proto.errors import ConfigError, InvalidArgument, KVError

if TYPE_CHECKING:
    from kvstrata.cli.tenant_import import Change
    from kvstrata.client.admin import AdminClient
    from kvstrata.proto import control_pb2 as control

tenant = typer.Typer(help="Tenants (cache salts) and their quotas.", no_args_is_help=True)

Salt = Annotated[str, typer.Argument(metavar="SALT", help='The tenant; "" is the empty salt.')]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be; change nothing.")]


@tenant.command("list")
def list_(master: Master = DEFAULT_MASTER, as_json: Json = False) -> None:
    """Tenants that have a policy or use anything, and the default."""
    from kvstrata.cli.tenant_tables import print_tenants

    with expected_errors():
        with ask(master) as admin:
            listed = admin.list_tenants()
        if as_json:
            print_json(as_dict(listed))
        else:
            print_tenants(listed)


@tenant.command()
def get(salt: Salt, master: Master = DEFAULT_MASTER, as_json: Json = False) -> None:
    """One tenant: policy, use by node and tier, and the hit rates that other quotas would give."""
    from kvstrata.cli.tenant_tables import print_tenant

    with expected_errors():
        with ask(master) as admin:
            listed = admin.list_tenants([salt], what_if=True)
        row = _row(listed, salt)
        if as_json:
            print_json(as_dict(row))
        else:
            print_tenant(row, listed)


@tenant.command("set")
def set_(
    salt: Annotated[str | None, typer.Argument(metavar="SALT", show_default=False)] = None,
    dram: Annotated[
        Limit | None, value_flag(Limit.parse, "SIZE|none", "--dram", help="At most so much memory, cluster-wide.")
    ] = None,
    ssd: Annotated[Limit | None, value_flag(Limit.parse, "SIZE|none", "--ssd", help="At most so much SSD.")] = None,
    dram_floor: Annotated[
        int | None, value_flag(parse_size, "SIZE", "--dram-floor", help="Memory that others' needs never take.")
    ] = None,
    ssd_floor: Annotated[
        int | None, value_flag(parse_size, "SIZE", "--ssd-floor", help="SSD that others' needs never take.")
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Of salts without a policy of their own.")] = False,
    deny: Annotated[bool, typer.Option("--deny", help="With --default: such salts store nothing.")] = False,
    dry_run: DryRun = False,
    master: Master = DEFAULT_MASTER,
    as_json: Json = False,
) -> None:
    """Change what is given of a tenant's policy, and leave the rest of it as it is."""
    with expected_errors():
        if default == (salt is not None):
            raise InvalidArgument('name one tenant ("" is the empty salt), or say --default')
        if deny and (not default or any(part is not None for part in (dram, ssd, dram_floor, ssd_floor))):
            raise InvalidArgument("--deny goes with --default, and with no limits")
        if not deny and all(part is None for part in (dram, ssd, dram_floor, ssd_floor)):
            raise InvalidArgument("nothing to change: give --dram, --ssd, --dram-floor or --ssd-floor")
        with ask(master) as admin:
            listed = admin.list_tenants([salt] if salt is not None else [])
            if salt is None:
                base = Policy() if listed.fallback_denies else Policy.of(listed.fallback)
                policy = NOTHING if deny else base.changed(dram, ssd, dram_floor, ssd_floor)
                changed = admin.set_default(policy.message(""), deny=deny, dry_run=dry_run)
            else:
                policy = _policy(listed, salt).changed(dram, ssd, dram_floor, ssd_floor)
                changed = admin.set_tenant(policy.message(salt), dry_run=dry_run)
        _say(changed, salt, policy, deny=deny, dry_run=dry_run, as_json=as_json)


@tenant.command()
def rm(
    salt: Salt,
    drop_blocks: Annotated[bool, typer.Option("--drop-blocks", help="Also remove its blocks, everywhere.")] = False,
    erase: Annotated[bool, typer.Option("--erase", help="With --drop-blocks: overwrite them on SSD.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    master: Master = DEFAULT_MASTER,
    as_json: Json = False,
) -> None:
    """Take a tenant's policy away: the default applies to it. Its blocks stay, unless told otherwise."""
    from kvstrata.cli.dropped import end_of

    with expected_errors():
        if erase and not drop_blocks:
            raise InvalidArgument("--erase goes with --drop-blocks")
        with ask(master) as admin:
            if drop_blocks and not dry_run:
                would = admin.remove_tenant(salt, drop_blocks=True, erase=erase, dry_run=True)
                confirm(f"{would.dropped.blocks} blocks of tenant {shown(salt)} will be removed", yes=yes)
            changed = admin.remove_tenant(salt, drop_blocks=drop_blocks, erase=erase, dry_run=dry_run)
        _say(changed, salt, None, dry_run=dry_run, as_json=as_json)
        if drop_blocks and not dry_run:
            end_of(changed.dropped.unreached)


@tenant.command()
def export(
    master: Master = DEFAULT_MASTER,
    path: Annotated[Path | None, typer.Option("--output", "-o", help="File to write (default: stdout).")] = None,
) -> None:
    """All policies and the default, as YAML that ``tenant import`` takes."""
    from kvstrata.cli.tenant_file import Policies, dump

    with expected_errors():
        with ask(master) as admin:
            listed = admin.list_tenants()
        if listed.left_out:
            raise InvalidArgument(f"the master left {listed.left_out} tenants out: this list would not be whole")
        text = dump(Policies.of(listed))
        if path is None:
            sys.stdout.write(text)
            return
        try:
            path.write_text(text)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


@tenant.command("import")
def import_(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="YAML as `tenant export` writes it; - is stdin.")],
    prune: Annotated[bool, typer.Option("--prune", help="Take policies away that the file does not name.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    master: Master = DEFAULT_MASTER,
) -> None:
    """Give tenants the policies of a file, after showing what changes."""
    from kvstrata.cli.tenant_file import Policies, load
    from kvstrata.cli.tenant_import import changes

    with expected_errors():
        wanted = load(_read(path), str(path))
        with ask(master) as admin:
            todo = changes(Policies.of(admin.list_tenants()), wanted, prune=prune)
            if not todo:
                say("nothing changes")
                return
            print_table("changes", ("tenant", "is", "will be"), [change.row() for change in todo])
            if dry_run:
                return
            confirm(f"{len(todo)} policies change", yes=yes)
            _apply(admin, todo)


def _apply(admin: AdminClient, todo: list[Change]) -> None:
    from kvstrata.cli.tenant_tables import print_warnings

    for done, change in enumerate(todo):
        try:
            print_warnings(change.apply(admin))
        except KVError:
            say(f"{done} of {len(todo)} were changed; {change.name} was refused, and nothing after it", err=True)
            raise
    say(f"{len(todo)} changed")


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _row(listed: control.TenantList, salt: str) -> control.TenantRow:
    """Its row; one that nobody has heard of uses nothing, under the default."""
    from kvstrata.proto import control_pb2 as control

    for row in listed.tenants:
        if row.policy.salt == salt:
            return row
    return control.TenantRow(policy=Policy.of(listed.fallback).message(salt))


def _policy(listed: control.TenantList, salt: str) -> Policy:
    """What applies to a tenant now: its own, or the default without its floors."""
    row = _row(listed, salt)
    if row.defined:
        return Policy.of(row.policy)
    return NOTHING if listed.fallback_denies else Policy.of(listed.fallback).changed(dram_floor=0, ssd_floor=0)


def _say(
    changed: control.TenantChanged,
    salt: str | None,
    policy: Policy | None,
    *,
    deny: bool = False,
    dry_run: bool,
    as_json: bool,
) -> None:
    from kvstrata.cli.tenant_tables import print_warnings

    if as_json:
        print_json(as_dict(changed))
        return
    name = "the default" if salt is None else f"tenant {shown(salt)}"
    text = "deny" if deny else "no policy of its own" if policy is None else policy.text()
    was = ""
    if salt is not None:
        was = Policy.of(changed.before.policy).text() if changed.before.defined else "no policy of its own"
        was = f" (was: {was})"
    say(f"{'would be' if dry_run else 'now'}: {name}: {text}{was}")
    if changed.HasField("dropped"):
        say(f"{changed.dropped.blocks} blocks {'would go' if dry_run else 'are gone'}")
    print_warnings(changed.warnings)

"""``kvstrata replicas ...``: on how many nodes blocks are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.as_json import as_dict
from kvstrata.cli.groups import GroupOption, find_optional
from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask
from kvstrata.cli.output import expected_errors, print_json, print_table, say
from kvstrata.cli.salts import Tenant, shown
from kvstrata.proto.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstrata.proto import control_pb2 as control

replicas = typer.Typer(help="Replicas: on how many nodes blocks are kept.", no_args_is_help=True)

Count = Annotated[
    int, typer.Argument(metavar="N", min=1, max=8, help="Nodes that have each block, if there are so many.")
]


@replicas.command("list")
def list_(master: Master = DEFAULT_MASTER, as_json: Json = False) -> None:
    """The default, tenants and namespaces with a number of their own, and how far the pool is from it."""
    with expected_errors():
        with ask(master) as admin:
            listed = admin.list_replicas()
        _print(listed, as_json=as_json)


@replicas.command("set")
def set_(
    count: Count,
    group: GroupOption = None,
    tenant: Tenant = None,
    master: Master = DEFAULT_MASTER,
    as_json: Json = False,
) -> None:
    """So many replicas for a tenant, a namespace, or (neither) by default. A tenant's number counts before others."""
    _change(count, group, tenant, master, as_json=as_json)


@replicas.command()
def unset(
    group: GroupOption = None, tenant: Tenant = None, master: Master = DEFAULT_MASTER, as_json: Json = False
) -> None:
    """Take a number away: the namespace's or the default's counts again."""
    _change(0, group, tenant, master, as_json=as_json)


def _change(count: int, group: str | None, tenant: str | None, master: str, *, as_json: bool) -> None:
    with expected_errors():
        if group is not None and tenant is not None:
            raise InvalidArgument("name a tenant or a namespace, not both")
        with ask(master) as admin:
            listed = admin.set_replicas(count, group=find_optional(admin, group), salt=tenant)
        _print(listed, as_json=as_json)


def _print(listed: control.ReplicasList, *, as_json: bool) -> None:
    if as_json:
        print_json(as_dict(listed))
        return
    rows = [("default", listed.fallback)]
    for rule in listed.rules:
        name = f"tenant {shown(rule.salt)}" if rule.HasField("salt") else f"namespace {rule.group}"
        rows.append((name, rule.count))
    print_table("replicas", ("of", "nodes"), rows)
    say(f"{listed.wanting} replicas are missing, {listed.surplus} are too many")

"""``kvstrata why``: the reason of a miss, of a request or of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.as_json import as_dict
from kvstrata.cli.groups import GroupOption, find_optional
from kvstrata.cli.hashes import looks_whole
from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask
from kvstrata.cli.output import expected_errors, print_json, print_table, say
from kvstrata.cli.salts import Tenant, shown
from kvstrata.proto.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstrata.client.admin import AdminClient
    from kvstrata.proto import control_pb2 as control


def why(
    name: Annotated[str, typer.Argument(metavar="REQUEST|HASH", help="An engine's request id, or a block's hash.")],
    tenant: Tenant = None,
    group: GroupOption = None,
    master: Master = DEFAULT_MASTER,
    as_json: Json = False,
) -> None:
    """Why is it not there? For a request: how much of it hit, and what became of the first block that did not.

    What is not the name of a remembered request, and could be a hash, is taken for one. --tenant and --namespace
    narrow a hash down.
    """
    with expected_errors():
        narrowed = tenant is not None or group is not None
        if narrowed and not looks_whole(name):
            raise InvalidArgument(f"--tenant and --namespace narrow hashes down, and {name!r} is none")
        with ask(master) as admin:
            found = None if narrowed else _request(admin, name)
            if found is None:
                block = bytes.fromhex(name)
                found = admin.explain(block_hash=block, group=find_optional(admin, group), salt=tenant)
        if as_json:
            print_json(as_dict(found))
        else:
            _say(found)


def _request(admin: AdminClient, name: str) -> control.Explanation | None:
    """None for what no request is called, and may be a hash: requests may have such names, too."""
    try:
        return admin.explain(request=name)
    except InvalidArgument:
        if looks_whole(name):
            return None
        raise


def _say(found: control.Explanation) -> None:
    say(f"{found.verdict}: {found.text}")
    if found.asked:
        say(f"asked {found.asked} blocks, {found.hit} hit")
    if found.hash:
        say(f"block {found.hash.hex()} of tenant {shown(found.salt)}" + (f" in {found.group}" if found.group else ""))
    if found.where:
        say(f"is on: {', '.join(found.where)}")
    if found.elsewhere:
        say(f"the same hash elsewhere: {'; '.join(found.elsewhere)}")
    if found.story:
        table = [(_age(line.age_seconds), line.what, line.node_id or "-") for line in found.story]
        print_table("what happened", ("ago", "what", "node"), table)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"

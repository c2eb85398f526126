"""docs/security.md says what each role may do as the code has it: the tables there are made here."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from kvstrata.master.access import ROUTES as MASTER_ROUTES
from kvstrata.master.access import RPCS
from kvstrata.master.status.pages import PUBLIC
from kvstrata.proto.wire import Kind
from kvstrata.storage.access import ROUTES as NODE_ROUTES
from kvstrata.transfer.security.access import Access
from kvstrata.transfer.security.admission import NEEDS
from kvstrata.transfer.security.rights import Role

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
BEGIN, END = "<!-- roles: begin -->\n", "<!-- roles: end -->"
NOBODY, ANYBODY = "nothing shown", "any token, any ticket"


def _needed(access: Access) -> list[str]:
    if access.open:
        return [NOBODY]
    if access.role is None:
        return [ANYBODY]
    return [access.role.value, *(["client with reset"] if access.may_reset else [])]


def _by_role(calls: Mapping[str, list[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for call, needed in calls.items():
        found[" or ".join(needed)].append(call)
    return found


def tables() -> str:
    """One table: for each need, the gRPC calls, HTTP routes and channel frames that have it."""
    routes = {f"{method} /{path}": _needed(each) for (method, path), each in MASTER_ROUTES.items()}
    for path in PUBLIC:  # the status page is one thing to whoever reads the table
        del routes[f"GET {path}"]
    routes["GET / (the page)"] = [NOBODY]
    routes |= {f"{method} /{path} (node)": _needed(each) for (method, path), each in NODE_ROUTES.items()}
    columns = (
        _by_role({rpc: _needed(access) for rpc, access in RPCS.items()}),
        _by_role(routes),
        _by_role({Kind(kind).name: [role.value for role in need.roles] or [ANYBODY] for kind, need in NEEDS.items()}),
    )
    order = [NOBODY, ANYBODY, *(role.value for role in Role)]
    needs = sorted(
        {need for column in columns for need in column}, key=lambda need: (order.index(need.split(" or ")[0]), need)
    )
    lines = ["| needs | gRPC | HTTP | channel |", "|---|---|---|---|"]
    for need in needs:
        cells = (", ".join(f"`{call}`" for call in sorted(column.get(need, []))) for column in columns)
        lines.append(f"| {need} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_tables_of_the_code() -> None:
    _, found, rest = PAGE.read_text().partition(BEGIN)
    assert found, f"{PAGE.name} has lost its mark {BEGIN!r}"
    assert rest.partition(END)[0] == tables(), "python -m tests.house.test_security_docs writes it anew"


def test_nobody_is_left_out() -> None:
    said = tables()
    assert "`DropBlocks`" in said and "`POST /ticket`" in said and "`HEARTBEAT`" in said
    assert all(f"| {role.value}" in said for role in Role)


if __name__ == "__main__":
    head, _, tail = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + tables() + END + tail.partition(END)[2])
    sys.exit(0)

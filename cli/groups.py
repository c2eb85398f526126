"""Namespaces by name: a group's fingerprint is long, so its beginning will do where only one group has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.proto.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstrata.client.admin import AdminClient
    from kvstrata.proto import control_pb2 as control

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The namespace's group, or enough of its beginning.")]
GroupOption = Annotated[
    str | None,
    typer.Option(
        "--namespace", metavar="GROUP", help="Of this namespace only; its beginning will do.", show_default=False
    ),
]

NAMES_SHOWN = 5


def find_group(admin: AdminClient, text: str) -> str:
    """The group called ``text``, or the only one that begins so. Raises :class:`InvalidArgument`."""
    return among({row.spec.group for row in admin.namespaces()}, text)


def find_optional(admin: AdminClient, text: str | None) -> str:
    """The same; no text is "", which stands for every namespace."""
    return "" if text is None else find_group(admin, text)


def among(groups: set[str], text: str) -> str:
    if text in groups:
        return text
    found = sorted(group for group in groups if text and group.startswith(text))
    if len(found) == 1:
        return found[0]
    names = found or sorted(groups)
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    listed = ", ".join(names[:NAMES_SHOWN]) + more if names else "none"
    raise InvalidArgument(f"{'several namespaces begin' if found else 'no namespace begins'} with {text!r}: {listed}")


def shards_of(rows: Sequence[control.NamespaceRow], group: str) -> list[control.NamespaceRow]:
    """The rows of a group, "" of all, in order of group and shard."""
    mine = [row for row in rows if not group or row.spec.group == group]
    return sorted(mine, key=lambda row: (row.spec.group, row.spec.shard_count, row.spec.shard))

"""Tenants for people: who uses how much of what it may, where, and what another quota would give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstrata.cli.output import print_table, say
from kvstrata.cli.salts import shown
from kvstrata.cli.sizes import format_size
from kvstrata.cli.tenant_policy import Policy
from kvstrata.proto import control_pb2 as control


def print_tenants(listed: control.TenantList) -> None:
    """One row a tenant, then the default."""
    table = [
        (
            shown(row.policy.salt),
            "own" if row.defined else "default",
            *_tier(row.dram_bytes, row.policy.dram_limit if row.policy.HasField("dram_limit") else None),
            _floor(row.policy.dram_floor),
            *_tier(row.ssd_bytes, row.policy.ssd_limit if row.policy.HasField("ssd_limit") else None),
            _floor(row.policy.ssd_floor),
            row.blocks,
            hit_rate(row),
        )
        for row in listed.tenants
    ]
    columns = ("tenant", "policy", "dram", "of", "floor", "ssd", "of", "floor", "blocks", "hits")
    print_table("tenants", columns, table)
    print_warnings(_unmet(listed.tenants))
    if listed.left_out:
        say(f"{listed.left_out} more are not shown: name them with `tenant get`")
    say(f"default: {default_text(listed)}")
    say(f"cluster: dram {format_size(listed.dram_bytes)}, ssd {format_size(listed.ssd_bytes)}")


def print_tenant(row: control.TenantRow, listed: control.TenantList) -> None:
    """One tenant: policy, use by node and tier, predictions."""
    policy = Policy.of(row.policy).text() if row.defined else f"none of its own; the default: {default_text(listed)}"
    say(f"tenant {shown(row.policy.salt)}")
    say(f"policy: {policy}")
    say(f"uses: dram {format_size(row.dram_bytes)}, ssd {format_size(row.ssd_bytes)}, {row.blocks} blocks")
    say(f"lookups: {row.blocks_asked} blocks asked, {row.blocks_hit} hit ({hit_rate(row)})")
    print_warnings(_unmet([row]))
    if row.nodes:
        columns = ("node", "dram", "of", "floor", "ssd", "of", "floor", "confirmed")
        print_table("by node", columns, [_node(node) for node in row.nodes])
    if row.what_if:
        print_what_if(row)


def print_what_if(row: control.TenantRow) -> None:
    table = [(f"{it.factor:g}x", format_size(it.bytes), f"{it.hit_rate:.1%}") for it in row.what_if]
    say(f"with another quota, by {row.sampled} sampled uses:")
    print_table("", ("quota", "bytes", "hit rate"), table)


def print_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}", err=True)


def _unmet(rows: Iterable[control.TenantRow]) -> Iterator[str]:
    for row in rows:
        for tier, nbytes in (("dram", row.dram_floor_unmet), ("ssd", row.ssd_floor_unmet)):
            if nbytes:
                salt, size = shown(row.policy.salt), format_size(nbytes)
                yield f"{salt}: {size} of its {tier} floor have no room on the nodes that are here"


def default_text(listed: control.TenantList) -> str:
    return "deny: salts without a policy store nothing" if listed.fallback_denies else Policy.of(listed.fallback).text()


def hit_rate(row: control.TenantRow) -> str:
    return f"{row.blocks_hit / row.blocks_asked:.1%}" if row.blocks_asked else "-"


def _node(node: control.TenantNode) -> tuple[object, ...]:
    share, usage = node.share, node.usage
    return (
        node.node_id,
        *_tier(usage.dram_bytes, share.dram_limit if share.HasField("dram_limit") else None),
        _floor(share.dram_floor),
        *_tier(usage.ssd_bytes, share.ssd_limit if share.HasField("ssd_limit") else None),
        _floor(share.ssd_floor),
        "yes" if node.confirmed else "no",
    )


def _tier(used: int, limit: int | None) -> tuple[str, str]:
    return format_size(used), "no limit" if limit is None else format_size(limit)


def _floor(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "-"

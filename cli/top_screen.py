"""A frame of ``kvstrata top``: the status document for a terminal. Pure: nothing is asked or printed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstrata.cli.output import plain
from kvstrata.cli.sizes import format_size

Document = dict[str, Any]

#: Rows where there is no height to keep to.
ROWS_MAX: Final = 60
NAME_CHARACTERS: Final = 40
BAR: Final = 12
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_VERDICTS: Final = {"healthy": ("HEALTHY", "bold green"), "attention": ("NEEDS ATTENTION", "bold yellow")}
_STYLES: Final = {
    "critical": "bold red", "warning": "yellow", "notice": "cyan", "info": "",
    "offline": "bold red", "suspected": "yellow", "joining": "cyan", "active": "green",
    "full": "yellow", "near": "cyan", "ok": "green",
}  # fmt: skip


def frame(document: Document, height: int | None = None, problem: str = "", stale_s: float = 0.0) -> RenderableType:
    """Everything in order of urgency, cut to ``height`` lines; ``problem``: why it is ``stale_s`` seconds old."""
    parts: list[RenderableType] = [
        _head(document, problem, stale_s),
        *_attention(document, 8),
        Text(),
        *_figures(document),
    ]
    if height is None:
        nodes = tenants = events = ROWS_MAX
    else:
        left = max(6, height - len(parts) - 10)
        nodes = min(len(document["nodes"]), max(2, left // 2))
        tenants = min(len(document["tenants"] or ()), max(1, (left - nodes) // 2))
        events = max(1, left - nodes - tenants)
    parts += [Text(), _nodes(document, nodes)]
    if document["tenants"]:
        parts.append(_tenants(document, tenants))
    parts.append(_events(document, events))
    return Group(*parts)


def safe(text: object, most: int = NAME_CHARACTERS) -> str:
    """What came from outside, for a terminal, and not too long."""
    shown = plain(text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def sparkline(values: Sequence[float | None], most: float) -> str:
    """One character a value, full height at ``most``; a blank where there is none."""
    return "".join(" " if value is None else _BLOCKS[min(7, int(value / most * 7.999))] for value in values)


def _head(document: Document, problem: str, stale_s: float) -> Text:
    words, style = _VERDICTS.get(document["verdict"], ("IN TROUBLE", "bold red"))
    master, leader = document["master"], document["leader"]
    role = f"{safe(master['channel'])} leads, epoch {master['epoch']}"
    if not master["leading"]:
        role = f"{safe(master['channel'])} stands by, " + (
            f"{safe(leader['channel'])} leads" if leader else "nobody leads"
        )
    line = Text.assemble(
        (words, style), f"  {safe(document['cluster_id'])}  {role}, up {_ago(document['uptime_seconds'])}"
    )
    if problem:
        line.append(f"\nSTALE for {_ago(stale_s)}: {safe(problem, 200)}", "bold red")
    return line


def _attention(document: Document, most: int) -> list[Text]:
    rows = [
        Text.assemble(
            (f"  {row['severity']:<9}", _STYLES[row["severity"]]),
            safe(row["text"], 160),
            (f"  ({safe(row['do'], 100)})" if row["do"] else "", "dim"),
            overflow="ellipsis",
            no_wrap=True,
        )
        for row in document["attention"][:most]
    ]
    more = len(document["attention"]) - most
    return [*rows, Text(f"  and {more} more", "dim")] if more > 0 else rows


def _figures(document: Document) -> list[Text]:
    totals, minute, hour = document["totals"], document["lookups"]["minute"], document["lookups"]["hour"]
    series, moved = document["series"], document["transfers"]
    rates = [hit / asked if asked else None for hit, asked in zip(series["hit"], series["asked"], strict=True)]
    misses = ", ".join(
        f"{document['miss_reasons'].get(reason, {'means': reason})['means']} {_percent(count / minute['asked'])}"
        for reason, count in list(minute["misses"].items())[:4]
    )
    tiers = "   ".join(
        f"{label} {_bar(totals[tier])} {format_size(totals[tier]['used'])} of {format_size(totals[tier]['size'])}"
        for tier, label in (("dram", "memory"), ("ssd", "ssd"))
        if totals[tier]["size"]
    )
    here = ", asked here" if len(document["masters"]) > 1 else ""
    lines = [
        f"nodes {totals['nodes_active']} of {totals['nodes']} active   blocks {totals['blocks']}   "
        f"clients {totals['clients']}   {tiers}",
        f"hit rate {_percent(minute['hit_rate'])} this minute, {_percent(hour['hit_rate'])} this hour{here}  "
        f"{sparkline(rates, 1.0)}",
        f"loads {_rate(moved['bytes_out_per_second'])}   stores {_rate(moved['bytes_in_per_second'])}   "
        f"copies {_rate(moved['bytes_copied_per_second'])}, {document['copies']['under_way']} under way",
    ]
    if misses:
        lines.insert(2, f"not found: {misses}")
    return [Text(line, overflow="ellipsis", no_wrap=True) for line in lines]


def _table(title: str, columns: Sequence[tuple[str, bool]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name, right in columns:
        table.add_column(
            name, justify="right" if right else "left", header_style="dim", no_wrap=True, overflow="ellipsis"
        )
    return table


def _nodes(document: Document, most: int) -> RenderableType:
    if not document["nodes"]:
        return Text(
            f"no node has attached: kvstrata storage --master {safe(document['master']['channel'])} --dram 8GiB"
        )
    columns = (("node", False), ("state", False), ("memory", False), ("ssd", False), ("loads", True), ("stores", True),
               ("blocks", True), ("heartbeat", True))  # fmt: skip
    table = _table("nodes" + _left_out(len(document["nodes"]) + document["nodes_left_out"], most), columns)
    for node in document["nodes"][:most]:
        beat = node["heartbeat_age_seconds"]
        drain = f", {node['drain']['state']}" if node["drain"] else ""
        state = ("stopped" if node["gone"] else node["state"]) + drain
        table.add_row(
            Text(safe(node["node_id"])),
            Text(state, "dim" if node["gone"] else _STYLES.get(node["state"], "")),
            f"{_bar(node['dram'])} {format_size(node['dram']['used'])}",
            f"{_bar(node['ssd'])} {format_size(node['ssd']['used'])}" if node["ssd"]["size"] else "-",
            _rate(node["bytes_out_per_second"]),
            _rate(node["bytes_in_per_second"]),
            str(node["blocks"]),
            "-" if beat is None else f"{beat:.1f} s",
        )
    return table


def _tenants(document: Document, most: int) -> RenderableType:
    columns = (("tenant", False), ("state", False), ("memory", False), ("ssd", False), ("refused, minute", True))
    table = _table("tenants" + _left_out(len(document["tenants"]) + document["tenants_left_out"], most), columns)
    words = {"full": "at its limit", "near": "near its limit", "ok": "within"}
    for tenant in document["tenants"][:most]:
        refused = tenant["refused_bytes_last_minute"]
        table.add_row(
            Text(safe(tenant["name"])),
            Text(words[tenant["state"]], _STYLES[tenant["state"]]),
            _limited(tenant["dram"]),
            _limited(tenant["ssd"]),
            format_size(refused) if refused else "-",
        )
    return table


def _events(document: Document, most: int) -> RenderableType:
    if not document["events"]:
        return Text("no events yet", "dim")
    table = _table("events", (("ago", True), ("", False), ("", False)))
    table.show_header = False
    table.columns[0].min_width, table.columns[1].min_width = 6, 8
    for event in reversed(document["events"][-most:]):
        again = f" ({event['times']} times)" if event["times"] > 1 else ""
        table.add_row(
            _ago(document["at"] - event["at"]),
            Text(event["severity"], _STYLES[event["severity"]]),
            Text(safe(event["text"], 200) + again),
        )
    return table


def _left_out(all_of_them: int, most: int) -> str:
    return f" ({most} of {all_of_them})" if all_of_them > most else ""


def _limited(tier: dict[str, Any]) -> str:
    if tier["limit"] is None:
        return format_size(tier["used"]) if tier["used"] else "-"
    used, limit = tier["used"], tier["limit"]
    return f"{_bar({'used': used, 'size': limit})} {format_size(used)} of {format_size(limit)}"


def _bar(tier: dict[str, Any]) -> str:
    share = min(1.0, tier["used"] / tier["size"]) if tier["size"] else 0.0
    full = round(share * BAR)
    return "█" * full + "░" * (BAR - full)


def _rate(bytes_per_second: float) -> str:
    return format_size(bytes_per_second) + "/s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"

"""``kvstrata node check``: nodes assert their invariants, and read blocks back if they are asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask, tickets
from kvstrata.cli.output import Exit, expected_errors, print_json, print_table, say
from kvstrata.cli.sizes import format_size, size_flag
from kvstrata.proto.errors import InvalidArgument, KVError

if TYPE_CHECKING:
    from kvstrata.proto import control_pb2 as control


@dataclass(frozen=True, slots=True)
class Checked:
    """One node: what it told, or why it did not."""

    node_id: str
    told: dict[str, Any] | None
    error: str = ""

    def problems(self) -> list[str]:
        """Everything that is wrong with it, in words."""
        if self.told is None:
            return [self.error]
        state, health = self.told["state"], self.told["health"]
        found = [f"invariant: {each}" for each in state["problems"]]
        if state["problems_left_out"]:
            found.append(f"{state['problems_left_out']} more invariants")
        found += [f"health: {each}" for each in health.get("problems", [])]
        found += [
            f"block {bad['hash']} in {bad['tier'].upper()} ({bad['group']} shard {bad['shard']}): {bad['status']}; "
            "withdrawn"
            for bad in self.told["bad"]
        ]
        if self.told["bad_left_out"]:
            found.append(f"{self.told['bad_left_out']} more bad blocks")
        return found

    def as_json(self) -> dict[str, Any]:
        return {"node_id": self.node_id, "healthy": not self.problems(), "error": self.error, **(self.told or {})}


def node_check(
    nodes: Annotated[list[str] | None, typer.Argument(help="Node ids; all nodes when none is named.")] = None,
    master: Master = DEFAULT_MASTER,
    scrub: Annotated[
        bool, typer.Option("--scrub", help="Read blocks back, and compare them with their checksums.")
    ] = False,
    scrub_bytes: Annotated[
        int, size_flag(help="At most so much of each tier of a node, from where the last scrub ended; 0: all.")
    ] = 0,
    rate: Annotated[int, size_flag(help="Bytes a second that a node reads for it.")] = 200 << 20,
    timeout: Annotated[float, typer.Option(help="Seconds for each node; it then ends, done or not.", min=1)] = 600,
    as_json: Json = False,
) -> None:
    """Have nodes check themselves. Exits 1 when one finds something wrong, or cannot be asked."""
    with expected_errors():
        from kvstrata.client.checking import check_node

        with ask(master) as admin:
            rows = _chosen(admin.nodes(), nodes or [])

        with tickets(master) as shown:

            def check(row: control.NodeRow) -> dict[str, Any]:
                return check_node(
                    row.channel,
                    scrub=scrub,
                    scrub_bytes=scrub_bytes,
                    bytes_per_second=rate,
                    seconds=timeout,
                    tickets=shown,
                )

            checked = _all(rows, check)
        if as_json:
            print_json([each.as_json() for each in checked])
        else:
            _say(checked)
        raise typer.Exit(Exit.FAILED if any(each.problems() for each in checked) else Exit.OK)


def _chosen(rows: Sequence[control.NodeRow], wanted: Sequence[str]) -> list[control.NodeRow]:
    by_id = {row.node_id: row for row in rows}
    unknown = [node_id for node_id in wanted if node_id not in by_id]
    if unknown:
        raise InvalidArgument(f"no node {', '.join(unknown)}: there are {', '.join(sorted(by_id)) or 'none'}")
    return [by_id[node_id] for node_id in dict.fromkeys(wanted)] if wanted else list(rows)


def _all(rows: Sequence[control.NodeRow], check: Callable[[control.NodeRow], dict[str, Any]]) -> list[Checked]:
    """Side by side: each node is as slow as itself."""

    def one(row: control.NodeRow) -> Checked:
        try:
            return Checked(row.node_id, check(row))
        except KVError as error:
            return Checked(row.node_id, None, f"{row.channel}: {error}")

    if not rows:
        return []
    with ThreadPoolExecutor(min(len(rows), 32)) as threads:
        return list(threads.map(one, rows))


def _say(checked: Sequence[Checked]) -> None:
    table: list[tuple[str, ...]] = []
    for each in checked:
        told = each.told
        if told is None:
            table.append((each.node_id, "not checked", "-", "-", "-", "-", "-"))
            continue
        state = told["state"]
        table.append(
            (
                each.node_id,
                ("problems" if each.problems() else "sound") + ("" if told["complete"] else ", not all looked at"),
                f"{state['blocks']}{'' if state['whole'] else ' in pieces'}",
                f"{state['longest_hold_ms']} ms",
                *(_scrubbed(told["scrub"].get(tier)) for tier in ("dram", "ssd")),
                f"{told['seconds']} s",
            )
        )
    print_table("", ("node", "state", "blocks", "longest hold", "read in memory", "read on SSD", "took"), table)
    for each in checked:
        for problem in each.problems():
            say(f"  {each.node_id}: {problem}")


def _scrubbed(row: dict[str, int] | None) -> str:
    if row is None:
        return "-"
    return f"{row['blocks']} blocks, {format_size(row['bytes'])}, {row['bad']} bad"

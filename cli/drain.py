"""``kvstrata node drain|undrain|remove``: nodes that leave, and how far they have got."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.as_json import as_dict
from kvstrata.cli.confirm import Yes, confirm
from kvstrata.cli.durations import format_duration, parse_duration
from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask
from kvstrata.cli.output import Exit, expected_errors, print_json, say
from kvstrata.cli.sizes import format_size, value_flag
from kvstrata.proto.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from kvstrata.proto import control_pb2 as control

NodeId = Annotated[str, typer.Argument(metavar="NODE", help="A node's id, as `kvstrata node list` shows it.")]
Budget = Annotated[
    float,
    value_flag(parse_duration, "TIME", "--budget", help="Stop copying after so long (10m, 90s); 0: no bound."),
]
WaitFor = Annotated[bool, typer.Option("--wait/--no-wait", help="Show progress until the drain is over.")]

POLL_S = 0.5
#: Masters that change leader are waited for; a drain that nobody can tell about for so long is given up on.
SILENT_S = 30.0
FORGOTTEN_S = 5.0
DRAINING, DRAINED = "draining", "drained"


def drain(
    node_id: NodeId,
    budget: Budget = 0.0,
    wait: WaitFor = True,
    master: Master = DEFAULT_MASTER,
    as_json: Json = False,
) -> None:
    """Empty a node: it takes no new blocks, and what it has is copied elsewhere, hottest first.

    It goes on serving meanwhile, and stays drained over restarts until `node undrain`. Exits 1 when blocks were left
    behind: no other node has room, or the time was over.
    """
    with expected_errors():
        with ask(master) as admin:
            row = admin.drain_node(node_id, budget_s=budget)
        if wait:
            row = _watch(master, node_id, quiet=as_json)
        if as_json:
            print_json(as_dict(row))
        else:
            _say(row)
        if wait and (row.drain.state != DRAINED or row.drain.bytes_failed):
            raise typer.Exit(int(Exit.FAILED))


def undrain(node_id: NodeId, master: Master = DEFAULT_MASTER, as_json: Json = False) -> None:
    """A node stays after all, and takes new blocks again. Copies that are too many then are let go."""
    with expected_errors():
        with ask(master) as admin:
            row = admin.drain_node(node_id, cancel=True)
        if as_json:
            print_json(as_dict(row))
        else:
            say(f"{node_id} stays, and takes new blocks")


def remove(
    node_id: NodeId,
    force: Annotated[bool, typer.Option("--force", help="Although it is here, or was not drained.")] = False,
    yes: Yes = False,
    master: Master = DEFAULT_MASTER,
    as_json: Json = False,
) -> None:
    """Take a node that is away off the roster: removals and drops wait for it no more, its shares go to others.

    Do not bring its disks back afterwards: blocks that were removed meanwhile would be found again.
    """
    with expected_errors():
        with ask(master) as admin:
            if force:
                confirm(f"node {node_id} is cut off, and its blocks are lost to the pool", yes=yes)
            row = admin.remove_node(node_id, force=force)
        if as_json:
            print_json(as_dict(row))
        else:
            say(f"{node_id} is off the roster")


def _watch(master: str, node_id: str, *, quiet: bool) -> control.NodeRow:
    """Wait for the end of a drain; raises :class:`Unavailable` when no master could be asked for long."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[bytes]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as progress:
        bar = progress.add_task(f"draining {node_id}", total=None, bytes="")
        heard, missed = time.monotonic(), 0.0
        while True:
            try:
                with ask(master) as admin:
                    row = next((row for row in admin.nodes() if row.node_id == node_id), None)
                heard = time.monotonic()
            except Unavailable:
                if time.monotonic() - heard > SILENT_S:
                    raise
                time.sleep(POLL_S)
                continue
            if row is None or not row.drain.state:
                missed = missed or time.monotonic()
                if time.monotonic() - missed > FORGOTTEN_S:  # and not a master that has not heard of it yet
                    raise InvalidArgument(f"the drain of {node_id} was cancelled, or the node was removed")
                time.sleep(POLL_S)
                continue
            missed = 0.0
            _show(progress, bar, row.drain)
            if row.drain.state != DRAINING:
                return row
            time.sleep(POLL_S)


def _show(progress: Progress, bar: TaskID, drain: control.DrainRow) -> None:
    done = drain.bytes_moved + drain.bytes_failed
    text = f"{format_size(drain.bytes_moved)} of {format_size(drain.bytes_total)}"
    if drain.bytes_failed:
        text += f", {format_size(drain.bytes_failed)} nowhere to go"
    progress.update(bar, total=drain.bytes_total or None, completed=done, bytes=text)


def _say(row: control.NodeRow) -> None:
    drain = row.drain
    text = (
        f"{row.node_id}: {drain.state}, {format_size(drain.bytes_moved)} of {format_size(drain.bytes_total)} elsewhere"
    )
    if drain.bytes_failed:
        text += f", {format_size(drain.bytes_failed)} nowhere to go"
    text += f", {format_duration(drain.elapsed_seconds)}"
    if drain.budget_seconds:
        text += f" of {format_duration(drain.budget_seconds)}"
    say(text)

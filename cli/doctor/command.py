"""``kvstrata doctor``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.masters import DEFAULT_MASTER, Json, tickets
from kvstrata.cli.output import Exit, expected_errors, print_json, print_table
from kvstrata.cli.sizes import addresses_flag, size_flag

if TYPE_CHECKING:
    from kvstrata.cli.doctor.rows import Check, Row
    from kvstrata.transfer.security.tickets import TicketSource


def doctor(
    master: Annotated[
        str | None,
        addresses_flag(
            "--master", help="Channel address of every master; none: this machine alone.", envvar="KVSTRATA_MASTER"
        ),
    ] = None,
    ssd: Annotated[
        list[Path] | None, typer.Option(help="A directory on an SSD, to be measured; again for each device.")
    ] = None,
    listen: Annotated[str | None, addresses_flag(help="Addresses that daemons are to listen on here.")] = None,
    round_trip: Annotated[
        bool, typer.Option("--round-trip", help="Store and load a few small blocks on every node, too.")
    ] = False,
    dram: Annotated[
        int | None, size_flag(help="Memory that a node here is to register for RDMA; by default all there is.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What is not as it should be on this machine and in the cluster, and what to do. Exits 1 on a problem."""
    with expected_errors():
        from kvstrata.cli.doctor.rows import Verdict, run

        with tickets(master) if master else nullcontext() as shown:
            rows = run(_checks(master, ssd or [], listen, round_trip, dram, shown))
        problems = sum(row.verdict is Verdict.PROBLEM for row in rows)
        if as_json:
            print_json({"healthy": not problems, "rows": [row.as_json() for row in rows]})
        else:
            _say(rows)
        raise typer.Exit(Exit.FAILED if problems else Exit.OK)


def _checks(
    master: str | None,
    ssd: list[Path],
    listen: str | None,
    round_trip: bool,
    dram: int | None,
    shown: TicketSource | None,
) -> list[Check]:
    from kvstrata.cli.doctor import cluster, disk, gpu, machine, ports, rails

    here = [*machine.checks(), *rails.checks(dram), *gpu.checks()]
    checks = [*here, *ports.checks(listen.split(",") if listen else [])]
    for path in ssd:
        checks.extend(disk.checks(path))
    if master is None:
        return [*checks, _no_cluster()]
    return [*checks, *cluster.checks(cluster.roster(master.split(",")), round_trip=round_trip, tickets=shown)]


def _no_cluster() -> Check:
    from kvstrata.cli.doctor.rows import Check, Row, Verdict

    advice = f"give --master HOST:PORT (as {DEFAULT_MASTER}) to have masters and nodes looked at"
    row = Row("cluster", "masters and nodes", Verdict.NOT_APPLICABLE, "no --master was given", advice)
    return Check("cluster", "masters and nodes", lambda: [row])


def _say(rows: list[Row]) -> None:
    from kvstrata.cli.doctor.rows import Verdict

    table = [(row.area, row.what, row.verdict.value, row.found, row.advice or "-") for row in rows]
    print_table("", ("area", "what", "verdict", "found", "what to do"), table)
    count = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    typer.echo(
        f"{count[Verdict.PROBLEM]} problems, {count[Verdict.WARNING]} warnings, {count[Verdict.OK]} in order, "
        f"{count[Verdict.NOT_APPLICABLE]} not applicable"
    )

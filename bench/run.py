"""Ours, the rooflines and the peers, in turns, in one run: ``python bench/run.py`` or ``./dev bench``.

In every round all systems take turns at every case, in another order each time, so that a machine whose speed drifts
slows all of them; figures are medians over rounds, ratios are between neighbours of one round. Pools live for a round,
so that nothing of ours is there while a peer runs. ``--peers DIR`` names a folder with a ``run.sh PEER`` that prints a
JSON line a case, with the peer's ``version`` in it or not. Written: ``latest.json`` (every round, machine, versions),
``latest.md`` (the sections of docs/performance.md; ``--docs`` puts them there), and plots.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))
from cases import BATCH, Case, size_name
from suite_clients import FIRST, clients_pool
from suite_machine import busy, machine, versions
from suite_main_pool import groups_of_main_pool, main_pool
from suite_markdown import sections, write
from suite_mixed import mixed_pool, ssd_pool
from suite_peers import PEERS, peer_round
from suite_plots import plot
from suite_results import Results
from suite_scale import QUICK, Found, Group, Scale

Wanted = Callable[[str], bool]
Stage = Callable[[Scale, Wanted], AbstractContextManager[list[Group]]]
HERE: Final = Path(__file__).parent
ROUNDS: Final = 5
ROUNDS_QUICK: Final = 2
#: Of cases, in the order in which they are shown.
KINDS: Final = ("blocks", "paged", "lookup", "clients", "mixed", "ssd", "latency")


def stages(scale: Scale) -> Iterator[tuple[Stage, list[str]]]:
    """Each with a pool of its own, and the names of its groups."""
    yield main_pool, groups_of_main_pool(scale)
    yield clients_pool, [FIRST, *(f"clients {count}" for count in scale.clients)]
    yield mixed_pool, ["mixed"]
    yield ssd_pool, ["ssd"]


def one_round(results: Results, scale: Scale, wanted: Wanted, order: random.Random) -> None:
    def add(system: str, found: Found) -> None:
        results.add(system, found)

    def repeated(text: str) -> None:
        print(text, file=sys.stderr)
        results.repeated.append(text)

    for stage, names in stages(scale):
        if not any(wanted(name) for name in names):
            continue
        with stage(scale, wanted) as groups:
            for group in groups:
                start = time.monotonic()
                group.run(order, add, repeated)
                print(f"  {group.name}: {time.monotonic() - start:.1f} s", file=sys.stderr)


def say(results: Results) -> None:
    """One table: systems side by side."""
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "system", "GB/s", "quartiles", "p50 us", "p99 us", "CPU s/GiB: client, node, master")
    for case in (case for kind in KINDS for case in results.cases(kind)):
        for system in results.systems(case):
            table.add_row(case.name, system, *_figures(results, case, system))
    Console(width=150).print(table)


def _figures(results: Results, case: Case, system: str) -> list[str]:
    speed = results.spread(case, system)
    spread = [f"{speed.median:.3f}", f"{speed.low:.3f} to {speed.high:.3f}"] if speed else ["", ""]
    latency = [results.spread(case, system, figure) for figure in ("p50_us", "p99_us")]
    costs = [results.spread(case, system, f"cpu of {role}") for role in ("client", "node", "master")]
    return [
        *spread,
        *(f"{one.median:.1f}" if one else "" for one in latency),
        ", ".join(f"{one.median:.3f}" if one else "-" for one in costs),
    ]


def save(results: Results, told: dict[str, Any], out: Path) -> str:
    """Write JSON and markdown; the markdown."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(told | {"repeated": results.repeated, "rows": results.as_list()}, indent=1))
    text = sections(results, told)
    out.with_suffix(".md").write_text(text + "\n")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, with --quick {ROUNDS_QUICK}")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, clients and bytes: under two minutes")
    parser.add_argument(
        "--case", action="append", default=[], help="part of the names of cases to run; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="show the names of the cases and end")
    parser.add_argument("--peers", type=Path, help="folder with run.sh and drivers of other systems")
    parser.add_argument("--peer", action="append", default=[], help=f"a peer to run; by default {', '.join(PEERS)}")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "latest.json")
    parser.add_argument("--docs", type=Path, help="put the figures into this page, between its marks")
    parser.add_argument("--from", dest="old", type=Path, help="measure nothing: read this JSON, write the rest again")
    options = parser.parse_args()
    scale = QUICK if options.quick else Scale()

    def wanted(name: str) -> bool:
        return not options.case or any(re.sub("^(load|store) ", "move ", part) in name for part in options.case)

    names = [name for _, some in stages(scale) for name in some]
    if options.list or not any(map(wanted, names)):
        print("\n".join(names))
        return 0 if options.list else 2
    if options.peer and options.peers is None:
        parser.error("--peer needs --peers: the folder that has its run.sh")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # daemons and rooflines end with it
    if options.old is not None:
        told = json.loads(options.old.read_text())
        results = Results.from_list(told.pop("rows"))
        results.repeated = told.pop("repeated")
    else:
        results, told = run(options, scale, wanted)
    text = save(results, told, options.out)
    drawn = plot(results, options.out.parent)
    say(results)
    if options.docs is not None:
        write(options.docs, text)
    if not drawn:
        print("no plots: pip install 'kvstrata[report]' brings matplotlib", file=sys.stderr)
    written = [options.out, options.out.with_suffix(".md"), *drawn, *([options.docs] if options.docs else [])]
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    return 0


def run(options: argparse.Namespace, scale: Scale, wanted: Wanted) -> tuple[Results, dict[str, Any]]:
    peers = options.peer or (list(PEERS) if options.peers else [])
    rounds = options.rounds or (ROUNDS_QUICK if options.quick else ROUNDS)
    sizes = [size for size in scale.sizes if any(wanted(f"move {batch} x {size_name(size)}") for batch in (1, BATCH))]
    lookups = any(wanted(f"lookup {count}") for count in scale.lookups)
    results, order, reason = Results(), random.Random(0), busy()
    if reason:
        print(reason, file=sys.stderr)
    told: dict[str, Any] = {"machine": machine(), "versions": versions(), "busy": reason, "quick": options.quick}
    for number in range(rounds):
        start = time.monotonic()
        one_round(results, scale, wanted, order)
        for peer in peers:
            before = time.monotonic()
            version = peer_round(results, options.peers / "run.sh", peer, sizes, lookups)
            if version:
                told["versions"][peer] = version
            print(f"  {peer}: {time.monotonic() - before:.1f} s", file=sys.stderr)
        print(f"round {number + 1}/{rounds}: {time.monotonic() - start:.1f} s", file=sys.stderr)
        told |= {"rounds": number + 1, "load_after": round(os.getloadavg()[0], 2)}
        save(results, told, options.out)  # what is there if the next round fails
    return results, told


if __name__ == "__main__":
    raise SystemExit(main())

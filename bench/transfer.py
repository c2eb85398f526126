"""Every way to a node against what this machine can do: ``python bench/transfer.py [--rails cma] [--rounds N]``.

Shared memory, tcp and one-sided reads (rdma), each for several shapes of a call, loads and stores, beside copies,
plain sockets, process_vm_readv and raw NIXL over the same pieces. Rooflines and clients stay open for the whole run; in
each round and for each shape they take turns, in another order each time, and a ratio is between neighbours of one
round. ``--rails cma`` needs NIXL and no device: UCX over cross-memory attach, between processes of this machine.
``--rails on`` needs an RDMA device. At the end: what an attached node and client cost while nothing is asked of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from transfer_idle import Idle, idle
from transfer_nixl import engine_reads, raw_nixl
from transfer_pool import Missed, Way, pool
from transfer_report import Results, plot, say
from transfer_rooflines import rooflines
from transfer_shapes import SHAPES, Shape, Worker

OPS = ("load", "store")
ROOFLINES = ("memcpy", "memcpy+xxh3", "socket", "vm_readv")
#: How a client names what the node calls ``--rdma on`` and ``--rdma cma``.
TRANSPORT = {"on": "rdma", "cma": "rdma-cma"}
#: Turns of one system and shape in a round: on a machine with other work a node may be silent for a moment.
TRIES = 5
Turn = Callable[[Shape], None]


def turns(stack: ExitStack, results: Results, master: str, rails: str, only: list[str]) -> list[Turn]:
    """One for each system that is called one of ``only``, or for all; they are open until ``stack`` ends."""

    def wanted(name: str) -> bool:
        return not only or name in only

    plain = Worker(rooflines)
    stack.callback(plain.close)
    found = [_roofline(results, plain, name) for name in ROOFLINES if wanted(name)]
    ways = [
        ("kvstrata-shm", "shm", "private"),
        ("kvstrata-shm, allocated", "shm", "shared"),
        ("kvstrata-shm, staged", "shm", "device"),
        ("kvstrata-tcp", "tcp", "private"),
    ]
    if rails in TRANSPORT:
        raw = Worker(raw_nixl, "rdma" if rails == "on" else rails)
        stack.callback(raw.close)
        if raw.problem:
            raise SystemExit(raw.problem)
        if wanted("nixl"):
            found.append(_roofline(results, raw, "nixl"))
        if wanted("kvstrata-engine"):
            engine = Worker(engine_reads, "rdma" if rails == "on" else rails)
            stack.callback(engine.close)
            if engine.problem:
                raise SystemExit(engine.problem)
            found.append(_roofline(results, engine, "kvstrata-engine"))
        ways.append((f"kvstrata-{TRANSPORT[rails]}", TRANSPORT[rails], "private"))
        ways.append((f"kvstrata-{TRANSPORT[rails]}, staged", TRANSPORT[rails], "device"))
    for system, transport, memory in ways:
        if not wanted(system):
            continue
        way = Way(system, master, transport, memory)
        stack.callback(way.close)
        found.append(_ours(results, way))
    return found


def _roofline(results: Results, worker: Worker, name: str) -> Turn:
    def turn(shape: Shape) -> None:
        for op in OPS:
            results.add(name, shape, op, worker.round(name, op, shape))

    return turn


def _ours(results: Results, way: Way) -> Turn:
    def turn(shape: Shape) -> None:
        for left in reversed(range(TRIES)):
            try:
                stored, loaded = way.rounds(shape)
                break
            except Missed as error:
                if not left:
                    raise SystemExit(f"{way.system}, {shape.name}: {error}, {TRIES} times") from error
                print(f"{way.system}, {shape.name}: {error}; once more", file=sys.stderr)
                results.repeated += 1
        results.add(way.system, shape, "store", stored)
        results.add(way.system, shape, "load", loaded)

    return turn


def idle_figures(options: argparse.Namespace) -> list[Idle]:
    """Without rails, then with."""
    cases = [("off", "tcp")]
    if options.rails in TRANSPORT:
        cases.append((options.rails, TRANSPORT[options.rails]))
    return [idle(options.dram, rails, transport, options.idle) for rails, transport in cases] if options.idle else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rails", choices=("off", "cma", "on"), default="cma", help="as kvstrata storage --rdma")
    parser.add_argument("--dram", default="2GiB")
    parser.add_argument("--shapes", help="part of the names of shapes to run, comma-separated; all by default")
    parser.add_argument("--system", action="append", default=[], help="run this one alone; may be repeated")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds of silence to measure; 0: none")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "transfer.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # daemons and rooflines end with it
    wanted = [
        shape for shape in SHAPES if not options.shapes or any(o in shape.name for o in options.shapes.split(","))
    ]
    if not wanted:
        raise SystemExit(f"no shape is called {options.shapes!r}: there are {', '.join(s.name for s in SHAPES)}")
    idles = idle_figures(options)
    results, order = Results(), random.Random(0)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpus": os.cpu_count(), "machine": platform.platform(), "python": platform.python_version()}
    with ExitStack() as stack:
        master = stack.enter_context(pool(options.dram, options.rails)).master
        systems = turns(stack, results, master, options.rails, options.system)
        for number in range(options.rounds):
            start = time.monotonic()
            for shape in wanted:
                for turn in order.sample(systems, len(systems)):
                    turn(shape)
            print(f"round {number + 1}/{options.rounds}: {time.monotonic() - start:.1f} s", file=sys.stderr)
            rows = results.rows()
            told = {"machine": machine, "rails": options.rails, "rounds": number + 1, "repeated": results.repeated}
            told |= {"rows": [row.as_dict() for row in rows], "idle": [one.as_dict() for one in idles]}
            options.out.write_text(json.dumps(told, indent=1))
    say(rows)
    for one in idles:
        shares = f"node {one.node_percent} %, client {one.client_percent} %"
        print(f"{one.seconds:g} s of silence, --rdma {one.rails}, client over {one.transport}: {shares} of a core")
    drawn = plot(rows, options.out.with_suffix(".svg"))
    print(
        f"written: {options.out}{' and .svg' if drawn else '; no plot: matplotlib is not installed'}", file=sys.stderr
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

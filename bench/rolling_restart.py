"""What a rolling restart of all nodes costs: ``python bench/rolling_restart.py [--trace FILE] [--json]``.

A real master and four real nodes; `kvstrata replay`'s engine stand-ins serve a trace on them at a steady pace, verify
every byte and have no cache of their own. Each node in turn gets SIGTERM, ends, and starts again with the same data
directory; the next one follows when it is active and a pause is over. The pool has room for what three nodes must
hold. Hit rates are in percent of prompt tokens, and in brackets the points that they are from what the same requests
would have hit on a pool that nothing happens to. Exits 1 when a request failed or a byte was wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvstrata.cli.replay.options import ReplayOptions
from tests.chaos.cluster import Cluster
from tests.chaos.rolling import PHASES, Rolled, roll

#: name -> (megabytes on SSD, more options of a node).
VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "memory, drained": (0, ("--drain-on-stop", "30")),
    "memory and SSD, drained": (2, ("--drain-on-stop", "30")),
    "memory and SSD, stopped": (2, ()),
    "memory, stopped": (0, ()),
}
STOP_S = 60.0


def measure(name: str, given: argparse.Namespace) -> Rolled:
    ssd, more = VARIANTS[name]
    options = ReplayOptions(
        trace=given.trace, engines=2, private_tokens=0, block_tokens=512, bytes_per_token=given.bytes_per_token,
        sessions=given.sessions, seed=given.seed, masters="running",
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="rolling-restart-") as folder,
        Cluster(
            Path(folder),
            nodes=4,
            dram=f"{given.dram_mib}MiB",
            ssd=f"{ssd * given.dram_mib}MiB" if ssd else "",
            node_options=more,
        ) as cluster,
    ):
        return roll(
            cluster,
            options,
            warm=given.warm,
            around_s=given.around,
            pause_s=given.pause,
            per_second=given.per_second,
            stop_s=STOP_S,
            say=lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True),
        )


def row(name: str, rolled: Rolled) -> str:
    cells = [
        name,
        f"{len(rolled.errors) + sum(rolled.failed_calls.values())} of {rolled.requests}",
        str(rolled.wrong_bytes),
    ]
    cells += [f"{rolled.phases[each].hit:.1f} ({rolled.phases[each].points:+.1f})" for each in PHASES]
    stops = [each.stop_s for each in rolled.restarts]
    cells += [
        f"{rolled.deepest_points:+.1f}",
        f"{statistics.median(stops):.1f} s (longest {max(stops):.1f})",
        f"{rolled.lost_tokens / 1e6:.1f} M tokens",
        str(rolled.blocks_moved),
        f"{rolled.longest_calls_s * 1e3:.0f} ms ({rolled.longest_undisturbed_s * 1e3:.0f})",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = ("nodes", "failed", "wrong bytes", "hit rate before", "during", "after", "deepest dip", "a node stops in",
        "computed again", "blocks moved", "longest request (before)")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="of block ids; a seeded generator of agent sessions when left out")
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--bytes-per-token", type=int, default=16)
    parser.add_argument("--dram-mib", type=int, default=160, help="memory of a node")
    parser.add_argument("--warm", type=int, default=600, help="requests before the pace is kept")
    parser.add_argument("--per-second", type=float, default=15.0, help="requests")
    parser.add_argument("--around", type=float, default=10.0, help="seconds of replay before and after")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds after each restart")
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="may be repeated; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = {name: measure(name, given) for name in given.variant or VARIANTS}
    if given.json:
        print(json.dumps({name: dataclasses.asdict(rolled) for name, rolled in found.items()}))
    else:
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
        for name, rolled in found.items():
            print(row(name, rolled))
            print(f"  {name}: what was not loaded or stored, by reason: {rolled.reasons}", file=sys.stderr)
    bad = [name for name, rolled in found.items() if rolled.errors or rolled.failed_calls or rolled.wrong_bytes]
    if bad:
        print(f"failed requests or wrong bytes: {', '.join(bad)}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

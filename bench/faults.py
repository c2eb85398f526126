"""How long a lost node costs a client: ``python bench/faults.py [--rounds N] [--json]``.

A pool of real processes with two nodes (each on a host of its own, a network namespace, where root may make
them). In each round a node is killed, stopped or cut off, and a client loads blocks that are there: until it
has them as misses, until it misses again with the breaker open, and what a load from the other node takes
meanwhile. Medians over rounds, and the worst. Nothing is replicated: what another replica saves is in
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvstrata.client import Client
from tests.chaos import hosts
from tests.chaos.cluster import Cluster
from tests.chaos.test_links import COUNT, Chain, chains
from tests.e2e.real_pool import until

#: Milliseconds that are promised until a miss.
BUDGET_MS = {"killed": 100.0, "stopped": 250.0, "cut off": 250.0}


def hurt(cluster: Cluster, how: str) -> None:
    if how == "killed":
        cluster.kill("node0")
    elif how == "stopped":
        cluster.signal("node0", signal.SIGSTOP)
    else:
        cluster.cut("node0")


def heal(cluster: Cluster, how: str) -> None:
    if how == "killed":
        cluster.start("node0")
    elif how == "stopped":
        cluster.signal("node0", signal.SIGCONT)
    else:
        cluster.mend("node0")
    until(cluster.whole, 30)


def timed_ms(chain: Chain) -> tuple[int, float]:
    """(blocks loaded, milliseconds)."""
    result, took_s = chain.load()
    return int(result.loaded.sum()), took_s * 1e3


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """fault -> what -> milliseconds, one a round."""
    on_hosts = not hosts.why_not()
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), nodes=2, hosts=on_hosts, dram="64MiB") as cluster,
    ):
        for how in ("killed", "stopped", *(("cut off",) if on_hosts else ())):
            for number in range(rounds):
                with Client(cluster.masters, transport="tcp", verify="always") as client:
                    both = chains(cluster, client, f"{how}/{number}")
                    assert all(timed_ms(chain)[0] == COUNT for chain in both.values())
                    hurt(cluster, how)
                    loaded, first_ms = timed_ms(both["node0"])
                    again, next_ms = timed_ms(both["node0"])
                    assert loaded == again == 0, "nobody else has them"
                    others = [timed_ms(both["node1"]) for _ in range(20)]
                    assert all(loaded == COUNT for loaded, _ in others)
                    row = found[how]
                    row["first miss"].append(first_ms)
                    row["next miss"].append(next_ms)
                    row["other node"].append(max(took_ms for _, took_ms in others))
                    heal(cluster, how)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.rounds)
    medians = {how: {what: statistics.median(took) for what, took in row.items()} for how, row in found.items()}
    if args.json:
        print(json.dumps({"rounds": args.rounds, "median_ms": medians, "all_ms": found}))
    else:
        for how, row in found.items():
            told = ", ".join(
                f"{what} {medians[how][what]:.1f} ms (worst {max(took):.1f})" for what, took in row.items()
            )
            print(f"{how}: {told}; promised {BUDGET_MS[how]:.0f} ms to the first miss")
    return int(any(medians[how]["first miss"] > BUDGET_MS[how] for how in medians))


if __name__ == "__main__":
    sys.exit(main())

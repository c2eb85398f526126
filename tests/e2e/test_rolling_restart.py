"""All nodes restarted in turn under replay, each drained first: nobody notices."""

from __future__ import annotations

from pathlib import Path

from kvstrata.cli.replay.options import ReplayOptions
from tests.chaos.cluster import Cluster
from tests.chaos.rolling import roll

#: A drain of a few MiB takes a second; the rest is for a shared machine.
STOP_S = 30.0


def test_a_rolling_restart_with_drains_loses_no_request_and_no_block(tmp_path: Path) -> None:
    options = ReplayOptions(
        engines=2, private_tokens=0, block_tokens=512, bytes_per_token=4, sessions=30, masters="running"
    )
    with Cluster(tmp_path, nodes=4, dram="48MiB", node_options=("--drain-on-stop", str(STOP_S))) as cluster:
        rolled = roll(cluster, options, warm=100, around_s=1.0, pause_s=0.5, per_second=15.0, stop_s=STOP_S + 15)
    assert not rolled.errors and not rolled.failed_calls
    assert rolled.wrong_bytes == 0
    assert len(rolled.restarts) == 4 and all(each.drained for each in rolled.restarts)
    assert rolled.blocks_moved >= max(each.blocks_before for each in rolled.restarts) > 0
    # Zero as a rule: a call may come too late on a busy machine. Without drains it is about ten points.
    assert rolled.phases["during"].points > -3.0, rolled
    assert rolled.phases["after"].points > -3.0, rolled

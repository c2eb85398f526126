"""What several masters show: a standby that it is one and who leads, and ``kvstrata top`` the leader's document."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from kvstrata.cli.top import StatusSource
from kvstrata.proto.errors import Unavailable
from tests.e2e.many_masters import ManyMasters
from tests.redis_server import needs_redis
from tests.waiting import until

TAKEOVER_S = 30.0


def status(pool: ManyMasters, name: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{pool.daemons[name].ready['http']}/status.json", timeout=10) as answer:
        return dict(json.load(answer))


def test_a_standby_names_the_leader_and_top_follows_it(tmp_path: Path) -> None:
    needs_redis()
    pool = ManyMasters(tmp_path, masters=2, nodes=1)
    try:
        leader = pool.leader(seconds=TAKEOVER_S)
        standby = next(name for name in pool.names if name != leader)
        until(lambda: len(status(pool, standby)["masters"]) == 2, TAKEOVER_S)
        seen = status(pool, standby)
        assert not seen["master"]["leading"] and seen["tenants"] is None and seen["verdict"] == "healthy"
        assert seen["leader"] == {
            "channel": pool.channels[leader],
            "http": pool.daemons[leader].ready["http"],
        }
        assert status(pool, leader)["master"]["leading"] and status(pool, leader)["tenants"] == []
        source = StatusSource(pool.channels[standby])
        assert source.ask()["master"]["channel"] == pool.channels[leader]
        pool.daemons[leader].end()
        until(lambda: _asked(source) == pool.channels[standby], TAKEOVER_S)
        assert any(event["kind"] == "leader" and "leads" in event["text"] for event in source.ask()["events"])
    finally:
        pool.close()


def _asked(source: StatusSource) -> str:
    """Which leader's document it is; "" while none leads."""
    try:
        master = source.ask()["master"]
    except Unavailable:
        return ""
    return str(master["channel"]) if master["leading"] else ""

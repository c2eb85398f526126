"""HTTP of a master and of a node under requests of all kinds: an answer below 500, and the process lives."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.client.admin import AdminClient
from tests.e2e.real_pool import RealPool

CI = pytest.param(300, id="ci")
LONG = pytest.param(3_000, id="long", marks=[pytest.mark.long, pytest.mark.timeout(600)])
METHODS = ("GET", "PUT", "DELETE", "POST", "HEAD", "PATCH", "BREW")
PATHS = (
    "/", "/metrics", "/healthz", "/readyz", "/quota", "/quota/", "/quota/a", "/quota/%00", "/quota/%ff%fe",
    "/quota/" + "s" * 200, "/tenants", "/tenants?salt=a&salt=", "/tenants?salt=%ff", "/quota/a?x=" + "y" * 2000,
    "/../etc", "/blocks", "/epochs/model", "/nodes",
)  # fmt: skip
BODIES = (
    b"", b"{}", b"[]", b"null", b"1", b"-1", b"NaN", b'"x"', b"\xff\xfe", b"{", b"[" * 3000,
    b'{"limit_gb": 1}', b'{"limit_gb": -1}', b'{"limit_gb": "x"}', b'{"limit_gb": 1e999}', b'{"limit_gb": NaN}',
    b'{"dram_limit": 99999999999999999999999}', b'{"dram_limit": null, "ssd_floor": true}', b"x" * 100_000,
    json.dumps({"quota": {"a": [1, {"b": None}]}}).encode(),
)  # fmt: skip


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    pool = RealPool(tmp_path, nodes=1)
    yield pool
    pool.end()


@pytest.mark.parametrize("count", [CI, LONG])
@pytest.mark.parametrize("name", ["master", "node0"])
def test_any_request_gets_an_answer(pool: RealPool, name: str, seed: int, count: int) -> None:
    chance = random.Random(seed)
    host, _, port = str(pool.daemons[name].ready["http"]).rpartition(":")
    seen: set[int] = set()
    for _ in range(count):
        method, path, body = chance.choice(METHODS), chance.choice(PATHS), chance.choice(BODIES)
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        try:
            connection.request(method, path, body, {"Content-Type": chance.choice(("application/json", "x", ""))})
            answer = connection.getresponse()
            answer.read()
        finally:
            connection.close()
        seen.add(answer.status)
        assert answer.status < 500 or path in ("/healthz", "/readyz"), f"{method} {path} {body[:80]!r}: {answer.status}"
    assert 200 in seen and 404 in seen
    assert pool.daemons[name].process.poll() is None
    with AdminClient(pool.address) as admin:
        assert admin.nodes()[0].state == "active"

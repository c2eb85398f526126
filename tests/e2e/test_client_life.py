"""The life of a client in a real pool: it is listed while it lives, and what it held is free at once when it dies."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from tests.e2e.real_pool import RealPool, keys
from tests.waiting import until

SIZE = 512
#: The kernel tells of a death at once; the rest is for a shared machine.
BOUND_S = 1.0

#: Holds a lease by shared memory, a half-done write by tcp, and the pool open; then waits to be killed.
DOOMED = """
import sys, time
sys.path.insert(0, sys.argv[4])
from kvstrata.client import Client
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity
from tests.e2e.real_pool import keys
client = Client(sys.argv[1], name="doomed")
ns = client.namespace("model/life", block_bytes=512, block_tokens=16)
if sys.argv[3] == "shm":
    view = client.view(ns, "", keys(8, "life"))
    assert all(block is not None for block in view.__enter__())
else:
    connection = Connection.open(sys.argv[2], Identity.new())
    opened = connection.call(Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=ns.to_spec()).SerializeToString())
    handle = pb.NamespaceHandle.FromString(opened.message).handle
    asked = pb.Reserve(ns=handle, hashes=keys(8, "half"), deadline_ms=60000, epoch=ns.epoch)
    assert pb.ReserveOk.FromString(connection.call(Kind.RESERVE, asked.SerializeToString()).message).reservation
print("held", flush=True)
time.sleep(60)
"""

#: Says what a client's first calls of each kind have imported, over one transport.
FIRST_CALLS = """
import sys, time
sys.path.insert(0, sys.argv[2])
from kvstrata.client import Client
from tests.e2e.real_pool import keys
from tests.waiting import until
with Client(sys.argv[1], transport=sys.argv[3], transfer_deadline_ms=20_000) as client:
    ns = client.namespace("model/first", block_bytes=4096, block_tokens=16)
    blocks = client.allocate(64 * 4096).rows(ns)
    here, some, absent = keys(64, sys.argv[3]), keys(8, sys.argv[3]) + keys(1, "absent"), keys(2, "absent")
    def by_index():
        was = client.health()["blocks_by_index"]
        assert client.load(ns, "", here, blocks).loaded.all()
        return client.health()["blocks_by_index"] > was
    before = set(sys.modules)
    client.lookup(ns, "", absent)
    assert client.store(ns, "", here, blocks).stored.all()
    for _ in range(2):
        client.lookup(ns, "", some)
        assert client.load(ns, "", here, blocks).loaded.all()
        client.load(ns, "", some, blocks[:9])
        until(lambda: sys.argv[3] != "shm" or by_index())
    client.remove(ns, "", here)
    print(sorted(set(sys.modules) - before))
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("life"), nodes=1)
    yield pool
    pool.end()


def held(pool: RealPool) -> tuple[int, int]:
    """Leases and reservations on the node."""
    with urllib.request.urlopen(f"http://{pool.node().ready['http']}/healthz", timeout=5) as answer:
        body = json.loads(answer.read())
    return body["leases"], body["reservations"]


def listed(pool: RealPool) -> list[str]:
    with AdminClient(pool.address) as admin:
        return [row.name for row in admin.clients()]


@pytest.mark.parametrize(("how", "holds"), [("shm", (1, 0)), ("tcp", (0, 1))])
def test_what_a_client_held_is_free_when_it_dies(pool: RealPool, how: str, holds: tuple[int, int]) -> None:
    with Client(pool.address, name="survivor") as client:
        ns = client.namespace("model/life", block_bytes=SIZE, block_tokens=16)
        rows = client.register(np.ones((8, SIZE), np.uint8)).rows(ns)
        until(lambda: client.store(ns, "", keys(8, "life"), rows).stored.all())
        until(lambda: client.lookup(ns, "", keys(8, "life")).hit_blocks == 8)
        until(lambda: held(pool) == (0, 0))
        here, channel = str(Path(__file__).parents[2]), str(pool.node().ready["channel"])
        doomed = subprocess.Popen(
            [sys.executable, "-c", DOOMED, pool.address, channel, how, here], stdout=subprocess.PIPE
        )
        try:
            assert doomed.stdout is not None and doomed.stdout.readline() == b"held\n"
            assert held(pool) == holds and {"doomed", "survivor"} <= set(listed(pool))
        finally:
            doomed.kill()
            doomed.wait(10)
            assert doomed.stdout is not None
            doomed.stdout.close()
        died = time.monotonic()
        until(lambda: held(pool) == (0, 0))
        until(lambda: "doomed" not in listed(pool))
        assert time.monotonic() - died < BOUND_S
        if how == "tcp":
            store = client.store(ns, "", keys(8, "half"), rows)
            assert store.stored.all(), f"what was written by half is not in the way: {store.reasons}"
        assert "survivor" in listed(pool)
    until(lambda: "survivor" not in listed(pool))


def test_a_client_that_is_idle_stays_listed(pool: RealPool) -> None:
    """Its signs of life keep it known, and show in how long it has been idle."""
    with Client(pool.address, name="idle"):
        until(lambda: "idle" in listed(pool))
        with AdminClient(pool.address) as admin:

            def row_of() -> float:
                return next(row.idle_seconds for row in admin.clients() if row.name == "idle")

            until(lambda: row_of() > 1.0)
            until(lambda: row_of() < 1.0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_first_calls_import_nothing(pool: RealPool, transport: str) -> None:
    """What they import they wait for, as many times as clients of a host begin at once."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", FIRST_CALLS, pool.address, root, transport]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize("main", ["client.client", "storage.daemon", "master.daemon"])
def test_a_process_has_what_numpy_imports_late(main: str) -> None:
    told = f"import sys, kvstrata.{main}; print('numpy.ma' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"

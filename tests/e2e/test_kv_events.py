"""KV events over real ZMQ from real daemons, in the form that vLLM documents; a route that follows a prefix; a mirror
of a real master's directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zmq

from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from kvstrata.client.index_watch import IndexWatch
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.proto.keys import salt_tag
from tests.command_line import run
from tests.e2e import real_pool
from tests.e2e.real_pool import ANY, Daemon, keys
from tests.waiting import until

BLOCK_BYTES = 4096
PROMPT = "The pool keeps what any engine has computed, so that no engine computes it twice. "
PUBLISHES = ("--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "0")
SMALL = ("--model", "tiny", "--kv-memory", "8MiB", "--max-model-len", "512", "--listen", ANY)
READY_S = 60.0


# What vLLM 0.32 documents: a batch is an array, an event a map that names its type; these fields must be there.
class Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """A reader as vLLM's example is one: what it missed it asks for again."""

    def __init__(self, endpoint: str, replay: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._replay = replay
        self.sequences: list[int] = []
        self.events: list[tuple[str, Stored | Removed | Cleared]] = []

    def hear(self, enough: Callable[[Subscriber], bool]) -> None:
        """Read until it is enough; asks for what was said before it came."""
        if self._replay:
            self._ask()
        deadline = time.monotonic() + READY_S
        while not enough(self):
            assert self._socket.poll(max(0.0, deadline - time.monotonic()) * 1000), self.events
            topic, sequence, payload = self._socket.recv_multipart()
            self._take(topic.decode(), int.from_bytes(sequence, "big"), payload)

    def _ask(self) -> None:
        with self._context.socket(zmq.DEALER) as request:
            request.connect(self._replay)
            request.send_multipart((b"", (0).to_bytes(8, "big")))
            while True:
                assert request.poll(READY_S * 1000)
                _, sequence, payload = request.recv_multipart()
                if sequence == b"\xff" * 8:
                    return
                self._take("", int.from_bytes(sequence, "big"), payload)

    def _take(self, topic: str, sequence: int, payload: bytes) -> None:
        if sequence not in self.sequences:
            self.sequences.append(sequence)
            batch = msgspec.msgpack.decode(payload, type=Batch)
            self.events += [(topic, event) for event in batch.events]

    def of(self, kind: type) -> list[Any]:
        return [event for _, event in self.events if isinstance(event, kind)]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines may start beside everything else that runs."""
    monkeypatch.setattr(real_pool, "READY_S", READY_S)


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Whatever has ``end`` or ``close``, ended last first."""
    things: list[Any] = []

    def keep(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield keep
    for thing in reversed(things):
        (thing.end if hasattr(thing, "end") else thing.close)()


Closing = Callable[[Any], Any]


def start_engine(closing: Closing, base: Path, name: str, pool: str) -> Daemon:
    engine: Daemon = closing(
        Daemon(
            "serve", *SMALL, "--name", name, "--pool", pool, "--kv-events", "0", "--kv-events-replay", "0",
            log=base / f"{name}.log",
        )
    )  # fmt: skip
    return engine


def start_master(closing: Closing, base: Path, *options: str, listen: str = ANY) -> Daemon:
    master: Daemon = closing(
        Daemon(
            "master", "--listen", listen, "--grpc", ANY, "--http", ANY, "--state", str(base / "state.db"), *options,
            log=base / "master.log",
        )
    )  # fmt: skip
    return master


def start_node(closing: Closing, base: Path, name: str, master: str) -> Daemon:
    node: Daemon = closing(
        Daemon(
            "storage", "--master", master, "--listen", ANY, "--http", ANY, "--data", str(base / name), "--dram",
            "32MiB", "--name", name, log=base / f"{name}.log",
        )
    )  # fmt: skip
    return node


def complete(engine: Daemon, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx.post(f"http://{engine.ready['http']}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def hashes_of(prompt: str, salt: str = "") -> list[bytes]:
    hasher = BlockHasher(16)
    found: list[bytes] = []
    hasher.extend(hasher.root(salt), found, list(prompt.encode()))
    return found


def test_an_engines_events_and_a_route_that_follows_the_prefix(closing: Closing, tmp_path: Path) -> None:
    first_master = start_master(closing, tmp_path)
    pool = str(first_master.ready["channel"])
    start_node(closing, tmp_path, "n0", pool)
    one, two = (start_engine(closing, tmp_path, name, pool) for name in ("one", "two"))

    heard = closing(Subscriber(one.ready["kv_events"], one.ready["kv_events_replay"]))
    complete(one, PROMPT, cache_salt="t")
    expected = hashes_of(PROMPT, "t")
    heard.hear(lambda each: {h for s in each.of(Stored) for h in s.block_hashes} >= set(expected))
    begin = next(stored for stored in heard.of(Stored) if stored.block_hashes[0] == expected[0])
    assert begin.parent_block_hash is None and begin.extra_keys[0] == ("t",) and begin.medium == "GPU"
    assert begin.block_size == 16 and begin.token_ids == list(PROMPT.encode())[: 16 * len(begin.block_hashes)]
    assert all(later.parent_block_hash for later in heard.of(Stored)[1:])
    assert [b - a for a, b in zip(heard.sequences, heard.sequences[1:], strict=False)] == [1] * (
        len(heard.sequences) - 1
    )

    # A master of its own for routing, so that engines that were there before are learnt by their replay sockets.
    options = [
        f"--engine-events={name}={engine.ready['kv_events']},replay={engine.ready['kv_events_replay']}"
        for name, engine in (("one", one), ("two", two))
    ]
    first_master.end()
    assert start_master(closing, tmp_path, *options, listen=pool).ready
    with AdminClient(pool) as admin:
        until(lambda: bool(admin.namespaces()) and len(admin.nodes()) == 1, READY_S)
        spec = admin.namespaces()[0].spec
        packed = b"".join(expected)

        def ranked() -> list[Any]:
            return list(admin.route(spec, "t", packed).engines)

        until(lambda: [(row.name, row.own_blocks) for row in ranked()] == [("one", len(expected)), ("two", 0)], READY_S)
        until(lambda: admin.route(spec, "t", packed).pool_blocks == len(expected), READY_S)
        until(lambda: all(row.boot_id and row.state == "live" for row in ranked()), READY_S)  # they found this master
        until(lambda: [row.near_blocks for row in ranked()][1] == len(expected), READY_S)  # and so did the node
        best, other = ranked()
        assert (other.pool_blocks, other.near_blocks) == (len(expected), len(expected)), other.why
        assert best.score > other.score > 0

        # The other engine loads the prefix from the pool, and has it then; load decides between the two.
        complete(two, PROMPT, cache_salt="t")
        until(lambda: all(row.own_blocks == len(expected) for row in ranked()), READY_S)
        busy = admin.route(spec, "t", packed, loads={"one": 0.9}).engines
        assert [row.name for row in busy] == ["two", "one"] and "load 0.90" in busy[1].why

        said = json.loads(run("route", "--master", pool, "--text", PROMPT, "--tenant", "t", "--json").stdout)
        assert said["asked"] == len(expected) and len(said["engines"]) == 2
        hex_lines = "\n".join(each.hex() for each in expected)
        piped = run("route", "-", "--master", pool, "--tenant", "t", typed=hex_lines)
        assert "engines, best first" in piped.stdout and piped.returncode == 0
        assert run("route", "--master", pool, "--text", "short").returncode == 2

        # An engine that dies is ranked last, and a problem in health in time.
        one.process.kill()
        one.process.wait(10)
        until(lambda: [(row.name, row.own_blocks) for row in ranked()][1] == ("one", 0), READY_S)
        assert ranked()[1].state == "cannot be reached"


@dataclass
class Publishing:
    """A pool whose master says its events; tests have a namespace each."""

    base: Path
    closing: Closing
    master: Daemon
    node: Daemon

    @property
    def pool(self) -> str:
        return str(self.master.ready["channel"])

    @classmethod
    def start(cls, base: Path, closing: Closing) -> Publishing:
        master = start_master(closing, base, *PUBLISHES)
        return cls(base, closing, master, start_node(closing, base, "n0", str(master.ready["channel"])))

    def restart_master(self) -> None:
        at = self.pool
        self.master.end()
        self.master = start_master(self.closing, self.base, *PUBLISHES, listen=at)
        assert self.master.ready


@pytest.fixture(scope="module")
def publishing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publishing]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(real_pool, "READY_S", READY_S)

        def keep(daemon: Daemon) -> Daemon:
            stack.callback(daemon.end)
            return daemon

        yield Publishing.start(tmp_path_factory.mktemp("publishing"), keep)


def test_the_pools_events_name_node_namespace_and_tenant(closing: Closing, publishing: Publishing) -> None:
    master, node, pool = publishing.master, publishing.node, publishing.pool
    assert master.ready["kv_events"].startswith("tcp://127.0.0.1:")
    heard = closing(Subscriber(master.ready["kv_events"], master.ready["kv_events_replay"]))
    client = closing(Client(pool))
    wide = keys(8, "w", 32)
    blocks = np.arange(8 * BLOCK_BYTES, dtype=np.uint8).reshape(8, BLOCK_BYTES)
    view = client.register(blocks).rows(
        ns := client.namespace("model", block_bytes=BLOCK_BYTES, block_tokens=16, hash_bytes=32)
    )
    until(lambda: bool(client.store(ns, "", wide, view).stored.all()), READY_S)
    assert client.store(ns, "tenant", wide, view).stored.all()
    expected = {wide[at : at + 32] for at in range(0, len(wide), 32)}
    assert node.ready["node_id"] == "n0"

    def own(events: list[Any]) -> list[Any]:
        """The hashes of 32 bytes: others are another test's."""
        return [h for event in events for h in event.block_hashes if isinstance(h, bytes) and len(h) == 32]

    def stored(topic: str) -> set[Any]:
        return {h for where, e in heard.events if where == topic and isinstance(e, Stored) for h in e.block_hashes}

    hashed = f"kv@n0@model#{salt_tag('tenant')}"
    client.remove(ns, "", wide[:32])
    heard._replay = ""  # from here on as published, with topics
    late = keys(1, "late", 32)
    assert client.store(ns, "tenant", late, client.register(blocks[:1].copy()).rows(ns)).stored.all()
    heard.hear(lambda each: late in stored(hashed))
    everything = closing(Subscriber(master.ready["kv_events"], master.ready["kv_events_replay"]))
    everything.hear(lambda each: bool(own(each.of(Removed))))
    assert set(own(everything.of(Stored))) == expected | {late}
    assert {s.medium for s in everything.of(Stored)} == {"CPU"}
    assert own(everything.of(Removed)) == [wide[:32]]
    named = [s.extra_keys for s in everything.of(Stored) if s.extra_keys and own([s])]
    assert named and all(key == (salt_tag("tenant"),) for extra in named for key in extra)

    with AdminClient(pool) as admin:
        admin.drop("model", "tenant")
    heard.hear(lambda each: (hashed, Cleared()) in each.events)
    assert ("kv@n0@model", Cleared()) not in heard.events, "the other tenant's blocks are there"


def test_a_mirror_follows_a_real_master(closing: Closing, publishing: Publishing) -> None:
    pool = publishing.pool
    client = closing(Client(pool))
    blocks = np.zeros((8, BLOCK_BYTES), dtype=np.uint8)
    view = client.register(blocks).rows(ns := client.namespace("mirrored", block_bytes=BLOCK_BYTES, block_tokens=16))
    before, after = keys(8, "before"), keys(8, "after")
    until(lambda: bool(client.store(ns, "t", before, view).stored.all()), READY_S)
    watch: IndexWatch = closing(IndexWatch(lambda: AdminClient(pool)))
    other: IndexWatch = closing(IndexWatch(lambda: AdminClient(pool), salts=("other*",)))
    assert watch.wait_live(READY_S) and other.wait_live(READY_S), watch.problem() + other.problem()
    until(lambda: watch.prefix(ns, "t", before).by_node == {"n0": 8}, READY_S)
    assert client.store(ns, "t", after, view).stored.all()
    until(lambda: watch.prefix(ns, "t", after).blocks == 8, READY_S)
    client.remove(ns, "t", after[:16])
    until(lambda: watch.prefix(ns, "t", after) == (0, {}), READY_S)
    assert other.prefix(ns, "t", before).blocks == 0, "what it did not ask for it is not told of"

    # Another process of the master is another epoch: begun again, and the same in the end.
    resets = watch.read(lambda mirror: mirror.resets)
    publishing.restart_master()
    until(lambda: watch.read(lambda mirror: mirror.resets) != resets, READY_S)
    until(lambda: watch.prefix(ns, "t", before).by_node == {"n0": 8} and not watch.problem(), READY_S)
    watch.read(lambda mirror: mirror.check())

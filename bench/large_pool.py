"""What the master of a large pool spends, and what it runs out of first: ``python bench/large_pool.py [--json]``.

A master as a real process; nodes as sync streams over real gRPC, each with its blocks, status and heartbeats; clients
as real connections. Of each kind of work the CPU time that the master spends on one message is measured, with all nodes
attached, and multiplied by how many a second a pool of ``--engines`` sends: a share of one core, since one Python
process runs on little more than one. What a pool sends follows from requests a second, prompt and answer; the hit rate
is taken to be high: of a prompt, ``--new`` tokens are stored, and in a full pool as many leave.

Memory is measured a block and a client.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import cpu_ns
from directory_attach import (
    HEARTBEAT_S,
    SALT,
    SPEC,
    FakeNode,
    a_master,
    directory_bytes,
    hashes_of,
    heartbeats,
    resident_bytes,
)

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity

#: Nodes say how they are, and that they live; clients that are quiet say that they live.
STATUS_S: Final = 1.0
BEAT_S: Final = 1.0
PING_S: Final = 5.0
QUIET_S: Final = 2.0
SETTLED_S: Final = 60.0
LOOK_S: Final = 0.002
#: Connections that heartbeats come by.
BEATERS: Final = 4
#: Two bursts of heartbeats.
REST_S: Final = 1.0
#: Of what costs next to nothing there are so many times as many, or all else that the master does would hide it.
CHEAP: Final = {"heartbeat of a node": 10, "status of a node": 5, "ping of a client": 20}
#: How often messages of each kind are sent, in turns.
TURNS: Final = 10


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a pool does. Tokens; requests a second of one engine."""

    engines: int
    nodes: int
    requests: float
    prompt: int
    new: int
    block_tokens: int

    @property
    def prompt_blocks(self) -> int:
        return self.prompt // self.block_tokens

    @property
    def new_blocks(self) -> int:
        return max(1, self.new // self.block_tokens)

    def rates(self) -> dict[str, float]:
        """Messages a second, by kind."""
        calls = self.engines * self.requests
        return {
            "lookup": calls,
            "place": calls,
            "announce": calls,
            "leave": calls,
            "heartbeat of a node": self.nodes / BEAT_S,
            "status of a node": self.nodes / STATUS_S,
            "ping of a client": self.engines / PING_S,
        }


class Node(FakeNode):
    """One that also says what comes and goes, and how it is."""

    seq = 1  #: of the last delta; the snapshot stands for the first

    def change(self, hashes: bytes, *, added: bool) -> None:
        self.seq += 1
        change = control.Change(added=added, spec=SPEC, salt=SALT, tier=0, hashes=hashes)
        self.say(delta=control.Delta(seq=self.seq, changes=[change]))

    def status(self) -> None:
        self.say(status=control.NodeStatus(dram_bytes_used=1 << 30, dram_bytes_free=1 << 40, blocks=1))


class Pool:
    """A master with all its nodes attached, and how to ask it for each kind of work."""

    def __init__(self, ready: dict[str, Any], traffic: Traffic, blocks: int) -> None:
        self.pid: int = ready["pid"]
        self.each = max(blocks // traffic.nodes, traffic.prompt_blocks)
        self.nodes: list[Node] = []
        self._traffic = traffic
        self._address: str = ready["channel"]
        self._connection = self.connect("client")
        self._over = threading.Event()
        # One connection is not enough: a node that is late for its turn is suspected, and what it has is not found.
        self._beaten: list[list[FakeNode]] = [[] for _ in range(BEATERS)]
        self._beating = [
            threading.Thread(target=heartbeats, args=(self._address, nodes, self._over), daemon=True)
            for nodes in self._beaten
        ]
        for thread in self._beating:
            thread.start()
        opened = self._connection.call(Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=SPEC).SerializeToString())
        self._handle = expect(pb.NamespaceHandle, opened, Kind.NAMESPACE_HANDLE)
        self._turn = 0

    def attach_all(self) -> None:
        for index in range(self._traffic.nodes):
            node = Node(self._connection.hello, index, self.each)
            node.prepare()
            self.nodes.append(node)
            self._beaten[index % BEATERS].append(node)
            node.attach()

    def connect(self, role: str) -> Connection:
        return Connection.open(self._address, Identity.new(role, "bench"), silence_s=30, connect_s=5)

    def close(self) -> None:
        self._over.set()
        for thread in self._beating:
            thread.join(10)
        for node in self.nodes:
            node.close()
        self._connection.close()

    # ------------------------------------------------------------------ one message of each kind

    def _next(self) -> Node:
        self._turn += 1
        return self.nodes[self._turn % len(self.nodes)]

    def _new(self) -> bytes:
        """Hashes that nobody has."""
        return np.random.default_rng((1 << 40) + self._turn).bytes(16 * self._traffic.new_blocks)

    def lookup(self) -> None:
        """A prompt whose prefix is there, but for what is new in it."""
        known = 16 * (self._traffic.prompt_blocks - self._traffic.new_blocks)
        hashes = hashes_of(self._next().index, known // 16) + self._new()
        ask = pb.Lookup(ns=self._handle.handle, salt=SALT, epoch=self._handle.epoch, hashes=hashes)
        answer = self._connection.call(Kind.LOOKUP, ask.SerializeToString())
        if expect(pb.LookupOk, answer, Kind.LOOKUP_OK).hit_blocks != known // 16:
            raise SystemExit("a lookup did not find what is there")

    def place(self) -> None:
        self._next()
        ask = pb.Place(ns=self._handle.handle, salt=SALT, epoch=self._handle.epoch, hashes=self._new())
        expect(pb.PlaceOk, self._connection.call(Kind.PLACE, ask.SerializeToString()), Kind.PLACE_OK)

    def heartbeat(self) -> None:
        node = self._next()
        message = pb.Heartbeat(node_id=node.node_id, incarnation=node.index + 1)
        self._connection.call(Kind.HEARTBEAT, message.SerializeToString())

    def ping(self) -> None:
        self._connection.call(Kind.PING, b"")

    def status(self) -> None:
        self._next().status()

    def changes(self, *, added: bool) -> Callable[[], None]:
        def say() -> None:
            self._next().change(self._new(), added=added)

        return say

    def settled(self) -> None:
        """Wait until the master has acknowledged all changes, and as long again as it may need for what it does not
        acknowledge. Raises SystemExit after :data:`SETTLED_S`, or for what a node was told."""
        until = time.monotonic() + SETTLED_S
        while not all(node.acked >= node.seq for node in self.nodes):
            for node in self.nodes:
                node.check()
            if time.monotonic() > until:
                raise SystemExit(f"the master has not taken all changes in within {SETTLED_S:.0f} s")
            time.sleep(LOOK_S)
        time.sleep(REST_S)

    def again(self) -> None:
        """What is said next is about the same blocks as what was said last."""
        self._turn = 0


def idle_share(pool: Pool) -> float:
    """CPU nanoseconds a second while nobody asks anything."""
    began, before = time.monotonic(), cpu_ns(pool.pid)
    time.sleep(QUIET_S)
    return (cpu_ns(pool.pid) - before) / (time.monotonic() - began)


def costs(pool: Pool, messages: int) -> tuple[float, dict[str, float]]:
    """The master's CPU seconds a second while nobody asks, heartbeats apart; and the CPU microseconds of a message of
    each kind, without what the master spends anyway."""
    kinds: dict[str, Callable[[], None]] = {
        "lookup": pool.lookup,
        "place": pool.place,
        "announce": pool.changes(added=True),
        "leave": pool.changes(added=False),
        "heartbeat of a node": pool.heartbeat,
        "status of a node": pool.status,
        "ping of a client": pool.ping,
    }
    spent = dict.fromkeys(kinds, 0.0)
    idles = []
    for _ in range(TURNS):
        idle = idle_share(pool)  # in each turn: other work of the machine makes all of it cost more, or less
        idles.append(idle)
        for kind, say in kinds.items():
            pool.again()
            began, before = time.monotonic(), cpu_ns(pool.pid)
            for _ in range(messages * CHEAP.get(kind, 1)):
                say()
            pool.settled()
            spent[kind] += cpu_ns(pool.pid) - before - idle * (time.monotonic() - began)
    each = {kind: spent[kind] / 1e3 / messages / CHEAP.get(kind, 1) / TURNS for kind in kinds}
    return sum(idles) / TURNS / 1e9 - each["heartbeat of a node"] / 1e6 * len(pool.nodes) / HEARTBEAT_S, each


def bytes_a_client(pool: Pool, clients: int) -> float:
    """What a connected client takes in the master."""
    before = resident_bytes(pool.pid)
    held = [pool.connect("client") for _ in range(clients)]
    taken = (resident_bytes(pool.pid) - before) / clients
    for connection in held:
        connection.close()
    return taken


def measure(traffic: Traffic, blocks: int, messages: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder, a_master(folder) as ready:
        empty = resident_bytes(ready["pid"])
        began = time.monotonic()
        pool = Pool(ready, traffic, blocks)
        try:
            pool.attach_all()
            attached_s = time.monotonic() - began
            held = pool.each * traffic.nodes
            full, tables = resident_bytes(pool.pid), directory_bytes(ready["http"])
            idle, each = costs(pool, messages)
            rates = traffic.rates()
            return {
                "nodes": traffic.nodes,
                "blocks": held,
                "attach_all_s": round(attached_s, 1),
                "tables_bytes_a_block": round(tables / held, 1),
                "resident_bytes_a_block": round((full - empty) / held, 1),
                "bytes_a_client": round(bytes_a_client(pool, min(traffic.engines, 200))),
                "idle_percent": round(100 * idle, 2),
                "us_a_message": {kind: round(cost, 1) for kind, cost in each.items()},
                "percent_of_a_core": {kind: round(rates[kind] * cost / 1e4, 2) for kind, cost in each.items()},
            }
        finally:
            pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4_000_000, help="that all nodes have together")
    parser.add_argument("--requests", type=float, default=0.5, help="a second, of each engine")
    parser.add_argument("--prompt", type=int, default=60_000, help="tokens")
    parser.add_argument("--new", type=int, default=800, help="tokens of prompt and answer that were not there")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--messages", type=int, default=300, help="of a kind, timed together")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    traffic = Traffic(given.engines, given.nodes, given.requests, given.prompt, given.new, given.block_tokens)
    result = measure(traffic, given.blocks, given.messages)
    if given.json:
        print(json.dumps(result))
        return
    say(result, traffic)


def say(result: dict[str, Any], traffic: Traffic) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "a second", "CPU us", "% of a core")
    rates = traffic.rates()
    for kind, share in sorted(result["percent_of_a_core"].items(), key=lambda row: -row[1]):
        table.add_row(kind, f"{rates[kind]:,.0f}", f"{result['us_a_message'][kind]:,.1f}", f"{share:,.1f}")
    table.add_row("idle", "", "", f"{result['idle_percent']:,.1f}")
    Console().print(table)
    for name, value in result.items():
        if not isinstance(value, dict):
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()

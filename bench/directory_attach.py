"""A node of a million blocks attaches to a master that knows ten million: how long, and what lookups feel meanwhile.

``python bench/directory_attach.py [--blocks N] [--nodes N] [--json]``. The master is a real process; nodes are sync
streams over real gRPC that send a real snapshot (packed before the clock runs, as the time it takes a node is the
node's) and heartbeats; lookups come from a process of their own, 1,000 hashes each, at a fixed pace. Reports the
attach from its first message to the acknowledgement of the whole snapshot, lookups idle, during it, and again after,
and the master's memory a block. All of it shares this machine's cores: with two, lookups also wait for the CPU.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import wire
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity

SPEC = pb.NamespaceSpec(
    group="bench/attach", shard=0, shard_count=1, block_bytes=1 << 20, block_tokens=256, hash_bytes=16
)
SALT = "tenant"
#: As a node sends them.
PART_HASHES = 1 << 16
LOOKUP_HASHES = 1000
PACE_S = 0.005
HEARTBEAT_S = 0.5
ATTACH_S = 300.0


def hashes_of(node: int, blocks: int) -> bytes:
    """The blocks of a node, the same in every process."""
    return np.random.default_rng(node).bytes(16 * blocks)


# ---------------------------------------------------------------- nodes


class FakeNode:
    """A sync stream that says it has blocks, and heartbeats that say it lives."""

    def __init__(self, hello: pb.HelloOk, index: int, blocks: int) -> None:
        self.node_id = f"node-{index}"
        self.index, self.blocks = index, blocks
        self._attach = control.NodeMessage(
            attach=control.Attach(
                node_id=self.node_id,
                incarnation=index + 1,
                channel=f"127.0.0.1:{10_000 + index}",
                boot_id=f"boot-{index}",
                dram_bytes=2 * blocks << 20,
                protocol=wire.PROTOCOL,
                software="bench",
            )
        ).SerializeToString()
        self._parts: list[bytes] = []
        self._over = threading.Event()
        self._attached = threading.Event()
        self.acked = 0  #: what the master has said that it has taken in
        self.problem = ""  #: why its stream is of no use any more
        self._acked: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  #: what follows the snapshot; None: no more
        self._channel = grpc.insecure_channel(hello.grpc, [("grpc.use_local_subchannel_pool", 1)])
        self._sync = self._channel.stream_stream(
            "/kvstrata.Master/Sync", lambda message: message, control.MasterMessage.FromString
        )

    def prepare(self) -> None:
        """Pack the snapshot."""
        packed = hashes_of(self.index, self.blocks)
        step = 16 * PART_HASHES
        for start in range(0, len(packed), step):
            holding = control.Holding(spec=SPEC, salt=SALT, tier=0, hashes=packed[start : start + step])
            snapshot = control.Snapshot(
                cut_seq=1, holdings=[holding], first=not start, last=start + step >= len(packed)
            )
            self._parts.append(control.NodeMessage(snapshot=snapshot).SerializeToString())

    def attach(self) -> float:
        """Seconds from the first message until the master has acknowledged the whole snapshot. Once prepared."""
        began = time.monotonic()
        threading.Thread(target=self._hear, args=(self._sync(self._messages()),), daemon=True).start()
        ended = self._acked.get(timeout=ATTACH_S)
        self.check()
        return ended - began

    def check(self) -> None:
        """Raises SystemExit when something has gone wrong."""
        if self.problem:
            raise SystemExit(f"{self.node_id}: {self.problem}")

    def _messages(self) -> Iterator[bytes]:
        yield self._attach
        self._attached.wait(ATTACH_S)
        while self._parts:
            yield self._parts.pop(0)
        yield from iter(self._said.get, None)

    def _hear(self, stream: Any) -> None:
        try:
            for message in stream:
                body = message.WhichOneof("body")
                if body == "attached":
                    self._attached.set()
                elif body == "ack" and message.ack.seq >= 1:
                    self.acked = message.ack.seq
                    self._acked.put(time.monotonic())
                elif body == "resync":
                    self._failed(f"the master asks for another snapshot: {message.resync.reason}")
        except grpc.RpcError as error:
            if not self._over.is_set():
                self._failed(f"its stream ended: {error}")

    def _failed(self, problem: str) -> None:
        self.problem = problem
        self._acked.put(time.monotonic())  # whoever waits

    def say(self, **body: Any) -> None:
        """After the snapshot: one message, whose body is given by name."""
        self._said.put(control.NodeMessage(**body).SerializeToString())

    def close(self) -> None:
        self._over.set()
        self._said.put(None)
        self._channel.close()


def heartbeats(master: str, nodes: list[FakeNode], over: threading.Event) -> None:
    connection = Connection.open(master, Identity.new("heartbeat"), silence_s=10, connect_s=5)
    while not over.wait(HEARTBEAT_S):
        for node in list(nodes):
            beat = pb.Heartbeat(node_id=node.node_id, incarnation=node.index + 1)
            connection.call(Kind.HEARTBEAT, beat.SerializeToString())
    connection.close()


# ---------------------------------------------------------------- lookups, in a process of their own


def look_up(master: str, nodes: int, blocks: int, file: str) -> None:
    """Until stdin closes: lookups of neighbours at random places; then (when, seconds, hits) of each in ``file``."""
    known = [hashes_of(index, min(blocks, 1 << 17)) for index in range(nodes)]
    connection = Connection.open(master, Identity.new("client", "bench lookups"), silence_s=30, connect_s=5)
    opened = connection.call(Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=SPEC).SerializeToString())
    handle = expect(pb.NamespaceHandle, opened, Kind.NAMESPACE_HANDLE)
    rng = np.random.default_rng(99)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    print("ready", flush=True)
    samples: list[tuple[float, float, int]] = []
    while not over.is_set():
        packed = known[int(rng.integers(nodes))]
        start = 16 * int(rng.integers(len(packed) // 16 - LOOKUP_HASHES + 1))
        ask = pb.Lookup(
            ns=handle.handle, salt=SALT, epoch=handle.epoch, hashes=packed[start : start + 16 * LOOKUP_HASHES]
        )
        message = ask.SerializeToString()
        at = time.monotonic()
        answer = connection.call(Kind.LOOKUP, message)
        took = time.monotonic() - at
        samples.append((at, took, expect(pb.LookupOk, answer, Kind.LOOKUP_OK).hit_blocks))
        time.sleep(max(0.0, PACE_S - took))
    np.save(file, np.array(samples))
    connection.close()


@contextmanager
def lookups(master: str, nodes: int, blocks: int, folder: str) -> Iterator[Path]:
    """The file is there once the block has ended."""
    file = Path(folder) / "lookups.npy"
    command = [sys.executable, __file__, "--look-up", master, str(nodes), str(blocks), str(file)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        if not process.stdout.readline():
            raise SystemExit("the process that looks up did not start: its reason is above")
        yield file
        process.stdin.close()
        process.wait(60)
    finally:
        process.kill()
        process.wait(10)


def percentiles(samples: npt.NDArray[np.float64], began: float, ended: float) -> dict[str, float]:
    """Of the lookups that began within: milliseconds, and how many they were."""
    took = samples[(samples[:, 0] >= began) & (samples[:, 0] < ended), 1] * 1e3
    names = {"p50_ms": 50, "p99_ms": 99, "max_ms": 100}
    return {"lookups": len(took), **{name: round(float(np.percentile(took, q)), 2) for name, q in names.items()}}


# ---------------------------------------------------------------- the master


@contextmanager
def a_master(folder: str) -> Iterator[dict[str, Any]]:
    free = "127.0.0.1:0"
    command = [sys.executable, "-m", "kvstrata.cli.app", "master", "--listen", free, "--grpc", free, "--http", free]
    process = subprocess.Popen(
        [*command, "--state", f"{folder}/state.db", "--log-format", "json", "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the master did not start: its reason is above")
        yield json.loads(line)
    finally:
        process.terminate()
        process.wait(30)


def resident_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


def directory_bytes(http: str) -> float:
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("kvstrata_master_directory_bytes "))


def measure(blocks: int, nodes: int, idle_s: float) -> dict[str, Any]:
    each = blocks // nodes
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder, a_master(folder) as ready:
        connection = Connection.open(ready["channel"], Identity.new("admin"), silence_s=10, connect_s=5)
        hello = connection.hello
        connection.close()
        empty = resident_bytes(ready["pid"])
        present: list[FakeNode] = []
        over = threading.Event()
        beat = threading.Thread(target=heartbeats, args=(ready["channel"], present, over), daemon=True)
        beat.start()
        filling = []
        for index in range(nodes):
            present.append(FakeNode(hello, index, each))
            present[-1].prepare()
            filling.append(present[-1].attach())
        before, tables = resident_bytes(ready["pid"]), directory_bytes(ready["http"])
        with lookups(ready["channel"], nodes, each, folder) as file:
            marks = [time.monotonic()]
            time.sleep(idle_s)
            marks.append(time.monotonic())
            late = FakeNode(hello, nodes, 1_000_000)
            late.prepare()  # outside of what is measured, and not idle
            present.append(late)
            marks.append(time.monotonic())
            attach_s = late.attach()
            marks.append(time.monotonic())
            time.sleep(idle_s)
            marks.append(time.monotonic())
        samples = np.load(file)
        over.set()
        beat.join(5)
        for node in present:
            node.close()
        return {
            "blocks": blocks,
            "nodes": nodes,
            "tables_bytes_a_block": round(tables / blocks, 1),
            "resident_bytes_a_block": round((before - empty) / blocks, 1),
            "first_attach_s": round(filling[0], 2),
            "last_attach_s": round(filling[-1], 2),
            "attach_1m_with_lookups_s": round(attach_s, 2),
            "idle": percentiles(samples, marks[0], marks[1]),
            "attaching": percentiles(samples, marks[3] - attach_s, marks[3]),
            "after": percentiles(samples, marks[3], marks[4]),
            "all_found": bool((samples[:, 2] == LOOKUP_HASHES).all()),
        }


def main() -> None:
    if sys.argv[1:2] == ["--look-up"]:
        master, nodes, blocks, file = sys.argv[2:]
        look_up(master, int(nodes), int(blocks), file)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--idle", type=float, default=5.0, help="seconds of lookups before, and after")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.blocks, arguments.nodes, arguments.idle)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()

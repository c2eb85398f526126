"""``kvstrata bench``: store, load and look up blocks on a running pool, bytes verified, and say how fast."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask
from kvstrata.cli.output import Exit, expected_errors, print_json, print_table
from kvstrata.cli.sizes import format_size, size_flag
from kvstrata.proto.errors import ConfigError, Corrupt, Unavailable

if TYPE_CHECKING:
    from kvstrata.client import Client

SETTLE_S = 10.0
BATCH_BYTES_MAX = 16 << 30
STAMP_BYTES = 8


@dataclass(frozen=True, slots=True)
class Figure:
    """One operation. ``transport``: what bytes took, after the last round. ``gb_s``: 10^9 bytes a second, median of
    rounds; latencies of one call in us."""

    op: str
    transport: str
    blocks: int
    block_bytes: int
    gb_s: float
    p50_us: float
    p99_us: float
    missed: int


def bench(
    master: Master = DEFAULT_MASTER,
    size: Annotated[int, size_flag(help="Bytes of a block.")] = 2 << 20,
    blocks: Annotated[int, typer.Option(help="Blocks in a call.", min=1, max=65536)] = 64,
    calls: Annotated[int, typer.Option(help="Calls in a round.", min=1, max=10000)] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are printed.", min=1, max=1000)] = 5,
    transport: Annotated[
        str, typer.Option(help="auto, shm, tcp, rdma, or rdma-cma (within this host); may end in +faults:...")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Measure store, load and lookup against a running pool. Exits 1 on wrong bytes or missed blocks."""
    with expected_errors():
        if not STAMP_BYTES <= size <= BATCH_BYTES_MAX // blocks:
            limits = f"{STAMP_BYTES} bytes a block and {format_size(BATCH_BYTES_MAX)} a call"
            raise ConfigError(f"{blocks} blocks of {format_size(size)}: the bounds are {limits}")
        _check_rails(transport)
        with ask(master):  # nobody there is said at once, and is not a slow pool
            pass
        from kvstrata.client import Client

        with Client(master, transport=transport, transfer_deadline_ms=30_000) as client:
            figures = Run(client, size, blocks, calls).figures(rounds)
    if as_json:
        print_json([asdict(figure) for figure in figures])
    else:
        _say(figures)
    raise typer.Exit(Exit.FAILED if any(figure.missed for figure in figures) else Exit.OK)


def _check_rails(transport: str) -> None:
    """Raises :class:`ConfigError`, with what to do, when rails are asked for that this machine cannot have."""
    name = transport.partition("+")[0]
    if name in ("rdma", "rdma-cma"):
        from kvstrata.transfer.rdma.found import find_rails
        from kvstrata.transfer.rdma.rails import RailMode
        from kvstrata.transfer.select import rail_options

        find_rails(rail_options(RailMode.ON if name == "rdma" else RailMode.CMA))


class Run:
    """Fresh keys each round, one source and one destination; removes what it stored.

    Each call's blocks carry a stamp of their own, the destination is wiped before each load and compared after
    it, all outside the timed part: bytes of another call, or none at all, do not pass.
    """

    def __init__(self, client: Client, block_bytes: int, blocks: int, calls: int) -> None:
        import numpy as np

        self._np = np
        self._client = client
        self._blocks = blocks
        self._calls = calls
        self._block_bytes = block_bytes
        self._salt = f"kvstrata-bench-{os.getpid()}"
        self._namespace = client.namespace(f"kvstrata.bench/{block_bytes}", block_bytes=block_bytes, block_tokens=16)
        source = client.allocate(blocks * block_bytes)
        target = client.register(_aligned(blocks * block_bytes))
        source.bytes[:] = np.random.default_rng(0).integers(0, 256, blocks * block_bytes, dtype=np.uint8)
        self._from, self._into = source.rows(self._namespace), target.rows(self._namespace)
        self._source = source.bytes.reshape(blocks, block_bytes)
        self._target = target.bytes.reshape(blocks, block_bytes)
        self._seconds: dict[str, list[list[float]]] = {"store": [], "load": [], "lookup": []}
        self._missed = dict.fromkeys(self._seconds, 0)

    def figures(self, rounds: int) -> list[Figure]:
        self._round(warm=True)
        for _ in range(rounds):
            self._round()
        return [self._figure(op) for op in self._seconds]

    def _round(self, warm: bool = False) -> None:
        keys = [self._keys() for _ in range(1 if warm else self._calls)]
        timed = {"store": [self._store(call, k) for call, k in enumerate(keys)]}
        if warm and (missed := timed["store"][0][1]):
            raise Unavailable(f"{missed} of the first {self._blocks} blocks were not stored: {self._why()}")
        timed["load"] = [self._load(call, k) for call, k in enumerate(keys)]
        self._wait_visible(keys)
        timed["lookup"] = [
            self._time(lambda k=k: self._client.lookup(self._namespace, self._salt, k).present)[:2] for k in keys
        ]
        for k in keys:
            self._client.remove(self._namespace, self._salt, k)
        if warm:
            return
        for op, results in timed.items():
            self._seconds[op].append([seconds for seconds, _ in results])
            self._missed[op] += sum(missed for _, missed in results)

    def _store(self, call: int, keys: bytes) -> tuple[float, int]:
        self._stamp(call)
        return self._time(lambda: self._client.store(self._namespace, self._salt, keys, self._from).stored)[:2]

    def _load(self, call: int, keys: bytes) -> tuple[float, int]:
        self._target[:] = 0
        seconds, missed, loaded = self._time(
            lambda: self._client.load(self._namespace, self._salt, keys, self._into).loaded
        )
        self._stamp(call)
        wrong = int((self._target[loaded] != self._source[loaded]).any(axis=1).sum())
        if wrong:
            raise Corrupt(f"wrong bytes: {wrong} of {self._blocks} blocks are not what was stored")
        return seconds, missed

    def _why(self) -> str:
        health: Any = self._client.health()
        told = health["blocks"].get("store", {})
        reasons = ", ".join(f"{n} {name}" for name, n in told.items() if name not in ("calls", "bytes", "asked"))
        return "; ".join([reasons, *health["problems"], "kvstrata doctor --round-trip tries every way to every node"])

    def _transport(self) -> str:
        nodes: Any = self._client.health()["nodes"]
        return ", ".join(sorted({node["transport"] for node in nodes if node["transport"]}))

    def _stamp(self, call: int) -> None:
        numbers = self._np.arange(call * self._blocks, (call + 1) * self._blocks, dtype="<u8")
        self._source[:, :STAMP_BYTES] = numbers.view(self._np.uint8).reshape(self._blocks, STAMP_BYTES)

    def _time(self, call: Any) -> tuple[float, int, Any]:
        """Seconds, positions that missed, and the mask."""
        start = time.perf_counter()
        mask = call()
        return time.perf_counter() - start, int(self._blocks - self._np.count_nonzero(mask)), mask

    def _keys(self) -> bytes:
        seed = os.urandom(16)
        return b"".join(
            hashlib.blake2b(seed + i.to_bytes(4, "little"), digest_size=16).digest() for i in range(self._blocks)
        )

    def _wait_visible(self, keys: list[bytes]) -> None:
        deadline = time.monotonic() + SETTLE_S
        for k in keys:
            while self._client.lookup(self._namespace, self._salt, k).hit_blocks != self._blocks:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        "the pool does not hold what was stored: is it smaller than "
                        f"{format_size(len(keys) * self._blocks * self._block_bytes)}, or is a node gone?"
                    )
                time.sleep(0.005)

    def _figure(self, op: str) -> Figure:
        rounds = self._seconds[op]
        calls = sorted(seconds for one in rounds for seconds in one)
        nbytes = 0 if op == "lookup" else self._calls * self._blocks * self._block_bytes
        return Figure(
            op=op,
            transport="" if op == "lookup" else self._transport(),
            blocks=self._blocks,
            block_bytes=self._block_bytes,
            gb_s=round(statistics.median(nbytes / sum(one) for one in rounds) / 1e9, 3),
            p50_us=round(statistics.median(calls) * 1e6, 1),
            p99_us=round(calls[min(len(calls) - 1, int(len(calls) * 0.99))] * 1e6, 1),
            missed=self._missed[op],
        )


def _aligned(nbytes: int) -> Any:
    """u8[nbytes] at a page's start, as engines have it: numpy's own begin 16 bytes behind, where copies that the kernel
    makes between processes run at half their speed."""
    import mmap

    import numpy as np

    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _say(figures: list[Figure]) -> None:
    names = ("op", "transport", "blocks", "block", "GB/s", "p50 us a call", "p99 us", "missed")
    rows = [
        (f.op, f.transport or "-", f.blocks, format_size(f.block_bytes), f.gb_s or "-", f.p50_us, f.p99_us, f.missed)
        for f in figures
    ]
    print_table("", names, rows)

"""Traces over processes: one call is one trace, with the spans of client, master and node under each other."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the otel extra is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased

from kvstrata.client import Client
from kvstrata.proto.keys import salt_tag
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.otel import OtelTracer
from kvstrata.transfer.otlp import OtlpTracing
from kvstrata.transfer.tracing import TRACING
from tests.e2e.otlp_receiver import Receiver, Seen
from tests.e2e.real_pool import ANY, Daemon, RealPool, keys, payload
from tests.e2e.traced_pool import TracedPool
from tests.waiting import until

BLOCK_BYTES = 64 << 10
SALT = "tenant-with-a-secret-name"
GROUP = "model/traced"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


@pytest.fixture(scope="module")
def traced(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedPool]:
    """A pool whose daemons send what callers sample. Tests know their spans by the trace."""
    pool = TracedPool(tmp_path_factory.mktemp("traced"), receiver.url)
    yield pool
    pool.end()


@contextmanager
def sending(collector: str, ratio: float = 1.0) -> Iterator[OtlpTracing]:
    """This process traces as an engine of ours does."""
    loops = Loops()
    tracing = OtlpTracing(collector, ratio, {"service.name": "engine"})
    tracing.start(loops)
    try:
        yield tracing
    finally:
        tracing.stop()
        loops.stop()


def moved(pool: RealPool, transport: str, count: int = 8, root: str = "engine.request") -> bytes:
    """A store, a lookup and a load (in a span ``root``) that succeed, and the hashes of the blocks.

    On a busy machine a peer may be too slow for its first call, so others are tried: of those blocks it has heard.
    """
    with Client(pool.address, transport=transport, verify="always") as client:
        ns = client.namespace(GROUP, block_bytes=BLOCK_BYTES, block_tokens=16)
        for attempt in range(20):
            hashes = keys(count, f"{transport}/{count}/{root}/{attempt}")
            data = payload(hashes, SALT, BLOCK_BYTES)
            if client.store(ns, SALT, hashes, client.register(data).rows(ns)).stored.all():
                break
            until(lambda: bool(client.health()["healthy"]))
        until(lambda: client.lookup(ns, SALT, hashes, request="req-1").hit_blocks == count)
        into = np.zeros_like(data)
        target = client.register(into).rows(ns)

        def loaded() -> bool:
            with TRACING.span(root):
                return bool(client.load(ns, SALT, hashes, target).loaded.all())

        until(loaded)
        assert (into == data).all()
        return hashes


def below(receiver: Receiver, root: Seen) -> dict[str, Seen]:
    """Spans of a trace by name, after checking that each has its parent in it."""
    spans = [span for span in list(receiver.spans) if span.trace == root.trace]
    ids = {span.span for span in spans}
    assert all(span.parent in ids for span in spans if span.span != root.span), spans
    return {span.name: span for span in spans}


def of_load(receiver: Receiver, root: str) -> Seen:
    """The last span of that name, when the node's part of its trace has come too."""
    found: list[Seen] = []

    def whole() -> bool:
        found[:] = receiver.named(root)[-1:]
        acquired = {span.trace for span in receiver.named("kvstrata.node.acquire")}
        return bool(found) and found[0].trace in acquired

    receiver.wait(whole, 30)
    return found[0]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_call_is_one_trace_over_three_processes(traced: TracedPool, receiver: Receiver, transport: str) -> None:
    root = f"engine.{transport}"
    begin = len(receiver.spans)
    with sending(receiver.url):
        hashes = moved(traced, transport, root=root)
    engine = of_load(receiver, root)
    mine = [span for span in receiver.spans[begin:] if span.service == "engine"]  # all sent, now that it has stopped
    (stored,) = [s for s in mine if s.name == "kvstrata.store" and s.facts.get("kvstrata.status.stored") == 8]
    found = [span for span in mine if span.name == "kvstrata.lookup"][-1]
    halves = {"shm": ("pull",), "tcp": ("reserve", "write")}[transport]
    ways = {f"kvstrata.node.{half}" for half in halves}

    def have(span: Seen, names: set[str]) -> bool:
        return names <= {each.name for each in list(receiver.spans) if each.trace == span.trace}

    receiver.wait(lambda: have(stored, ways | {"kvstrata.master.place"}), 30)
    receiver.wait(lambda: have(found, {"kvstrata.master.lookup"}), 30)

    load = below(receiver, engine)
    assert load["kvstrata.load"].parent == engine.span
    assert load["kvstrata.fetch"].parent == load["kvstrata.load"].span
    assert load["kvstrata.node.acquire"].parent == load["kvstrata.acquire"].span
    assert load["kvstrata.node.acquire"].service == "kvstrata-node" and load["kvstrata.load"].service == "engine"
    assert (load["kvstrata.acquire"].kind, load["kvstrata.node.acquire"].kind) == (3, 2)  # client, server
    assert {"kvstrata.copy", "kvstrata.verify"} <= set(load) or "kvstrata.receive" in load
    facts = load["kvstrata.load"].facts
    assert facts["kvstrata.group"] == GROUP and facts["kvstrata.blocks"] == 8
    assert facts["kvstrata.hit.dram"] == 8 and facts["kvstrata.status.loaded"] == 8
    assert facts["kvstrata.bytes"] == 8 * BLOCK_BYTES and facts["kvstrata.salt"] == salt_tag(SALT)
    assert load["kvstrata.fetch"].facts["kvstrata.transport"] == transport

    store = below(receiver, stored)
    assert store["kvstrata.master.place"].parent == store["kvstrata.directory.place"].span
    assert store["kvstrata.master.place"].service == "kvstrata-master"
    assert ways <= set(store)
    assert sum(store[name].facts.get("kvstrata.status.stored", 0) for name in ways) == 8

    lookup = below(receiver, found)
    assert lookup["kvstrata.master.lookup"].parent == lookup["kvstrata.directory.lookup"].span
    assert lookup["kvstrata.master.lookup"].facts["kvstrata.request"] == "req-1"
    assert lookup["kvstrata.master.lookup"].facts["kvstrata.hit.dram"] == 8

    everything = json.dumps([span.facts for span in receiver.spans])
    assert SALT not in everything
    assert not any(hashes[at : at + 16].hex() in everything for at in range(0, len(hashes), 16))


def test_what_is_not_sampled_is_sent_by_nobody(traced: TracedPool, receiver: Receiver) -> None:
    def flushed(root: str) -> str:
        """The trace of a load that was sampled, now that the node has sent it, and so all that came before."""
        with sending(receiver.url, ratio=1.0):
            moved(traced, "shm", root=root)
        trace = of_load(receiver, root).trace
        looked = [span.trace for span in receiver.named("kvstrata.lookup")][-1]
        receiver.wait(lambda: looked in {span.trace for span in receiver.named("kvstrata.master.lookup")}, 30)
        return trace

    flushed("marker.before")
    begin = len(receiver.spans)
    with sending(receiver.url, ratio=0.0):
        moved(traced, "shm", root="unsampled")
    assert not [span for span in receiver.spans[begin:] if span.service == "engine"]  # it has stopped: sent is sent
    flushed("marker.after")
    ours = {span.trace for span in receiver.spans if span.service == "engine"}
    assert {span.trace for span in receiver.spans[begin:]} <= ours


def test_daemons_begin_traces_of_their_own_when_told_to(tmp_path: Path) -> None:
    receiver = Receiver()
    pool = TracedPool(tmp_path, receiver.url, "--traces-ratio", "1")
    try:
        moved(pool, "shm")
        receiver.wait(lambda: bool(receiver.named("kvstrata.node.acquire")), 30)
    finally:
        pool.end()
        receiver.close()
    assert all(span.parent == "" for span in receiver.named("kvstrata.node.acquire"))
    assert not receiver.named("kvstrata.master.lookup")  # the master was not told to


def test_a_dead_collector_costs_no_call_and_shows(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # takes connections, and never answers
        collector = f"http://127.0.0.1:{taken.getsockname()[1]}"
        pool = TracedPool(tmp_path, collector, "--traces-ratio", "1")
        try:
            began = time.monotonic()
            with sending(collector) as tracing:
                for index in range(8):
                    moved(pool, "shm", count=2 + index)
                calls_s = time.monotonic() - began
                until(lambda: tracing.problem() != "")
                assert tracing.counts()["failed"] > 0
                began = time.monotonic()
            assert time.monotonic() - began < 8  # stopping is bounded
            assert calls_s < 20

            def facts() -> dict[str, object]:
                with urllib.request.urlopen(f"http://{pool.node().ready['http']}/healthz", timeout=5) as answer:
                    return dict(json.loads(answer.read()))

            until(lambda: dict(facts()["traces"])["failed"] > 0, 15)  # type: ignore[call-overload]
            health = facts()
            assert health["healthy"] and dict(health["traces"])["problem"]  # type: ignore[call-overload]
        finally:
            pool.end()


def test_an_engine_that_traces_has_our_spans_under_its_own(traced: TracedPool) -> None:
    """With a provider of the engine's, as vLLM sets one; nothing is configured here."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(ParentBased(ALWAYS_ON))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = OtelTracer(provider)
    try:
        TRACING.start(tracer)  # what join() does with the provider that trace.get_tracer_provider() gives
        with provider.get_tracer("engine").start_as_current_span("llm_request") as parent:
            moved(traced, "shm", root="of an engine")
        context = parent.get_span_context()
        loads = [span for span in exporter.get_finished_spans() if span.name == "kvstrata.load"]
        assert loads and all(span.context.trace_id == context.trace_id for span in loads)
        exporter.clear()
        unsampled = TracerProvider(ALWAYS_OFF).get_tracer("engine")
        with unsampled.start_as_current_span("llm_request"):
            moved(traced, "tcp", root="of an engine")
        assert not exporter.get_finished_spans()
    finally:
        TRACING.stop(tracer)
    assert trace.get_current_span() is trace.INVALID_SPAN and not TRACING.on


def test_the_bundled_engine_goes_on_with_the_trace_of_a_request(
    traced: TracedPool, tmp_path: Path, receiver: Receiver
) -> None:
    trace, caller = "5" * 32, "6" * 16
    engine = Daemon(
        "serve", "--listen", ANY, "--model", "tiny", "--kv-memory", "8MiB", "--pool", traced.address,
        "--traces", receiver.url, "--name", "engine-1", log=tmp_path / "engine.log",
    )  # fmt: skip
    try:
        body = json.dumps({"model": "tiny", "prompt": "word " * 60, "max_tokens": 2}).encode()
        headers = {"content-type": "application/json", "traceparent": f"00-{trace}-{caller}-01"}
        ask = urllib.request.Request(f"http://{engine.ready['http']}/v1/completions", body, headers)
        with urllib.request.urlopen(ask, timeout=30) as answer:
            assert answer.status == 200
        wanted = {"kvstrata.lookup", "kvstrata.store", "kvstrata.master.lookup", "kvstrata.master.place"}

        def gone_on() -> bool:
            return wanted <= {span.name for span in list(receiver.spans) if span.trace == trace}

        receiver.wait(gone_on, 30)
        ours = [span for span in list(receiver.spans) if span.trace == trace and span.parent == caller]
        assert {span.name for span in ours} == {"kvstrata.lookup", "kvstrata.store"}, ours
        assert {span.service for span in ours} == {"kvstrata-engine"}
        with urllib.request.urlopen(f"http://{engine.ready['http']}/metrics", timeout=5) as answer:
            assert b'kvstrata_client_blocks_asked_total{call="lookup",client="engine-1/0' in answer.read()
    finally:
        engine.end()

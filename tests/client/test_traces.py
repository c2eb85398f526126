"""Spans of the client itself, over a fake pool: what lies under what, and what nodes are told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstrata.client import Client
from kvstrata.transfer.base import Named
from kvstrata.transfer.tracing import TRACING
from tests.client.fake_pool import FakeMaster, FakeNode, FakePeer, packed, split
from tests.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.spans import recorded

COUNT = 4


@pytest.fixture
def finished() -> Iterator[InMemorySpanExporter]:
    with recorded() as exporter:
        yield exporter


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is current, as a traceparent, whenever a node is asked for a prefetch."""
    found: list[str] = []
    ask = FakePeer.prefetch

    def asked(peer: FakePeer, blocks: Named) -> object:
        found.append(TRACING.here())
        return ask(peer, blocks)

    monkeypatch.setattr(FakePeer, "prefetch", asked)
    return found


def _by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_prefetch_is_a_span_under_its_caller_s_and_nodes_are_asked_under_it_also_later(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode], finished: InMemorySpanExporter, told: list[str]
) -> None:
    ns = client.namespace("model/a", block_bytes=64, block_tokens=16)
    nodes["a"].put(ns, "", packed(COUNT), [bytes(64)] * COUNT)
    nodes["a"].on_ssd = set(split(packed(COUNT)))
    master.learn()
    finished.clear()
    with TRACING.span("caller"):
        prefetch = client.prefetch(ns, "", packed(COUNT + 2))
        until(prefetch.done)
    nodes["a"].on_ssd.clear()
    assert prefetch.wait() is not None
    spans = _by_name(finished)
    ours = spans["kvstrata.prefetch"]
    assert ours.parent is not None and ours.parent.span_id == spans["caller"].context.span_id
    looked = spans["kvstrata.directory.lookup"].parent
    assert looked is not None and looked.span_id == ours.context.span_id
    facts = dict(ours.attributes or {})
    assert facts["kvstrata.group"] == "model/a"
    assert (facts["kvstrata.blocks"], facts["kvstrata.hit.prefix"]) == (COUNT + 2, COUNT)
    context, asked_under = ours.context, {each.rpartition("-")[0] for each in told}
    assert len(told) >= 2 and asked_under == {f"00-{context.trace_id:032x}-{context.span_id:016x}"}


def test_a_prefetch_that_is_not_sampled_has_no_span_and_nodes_hear_so(
    client: Client, master: FakeMaster, nodes: dict[str, FakeNode], finished: InMemorySpanExporter, told: list[str]
) -> None:
    ns = client.namespace("model/a", block_bytes=64, block_tokens=16)
    nodes["a"].put(ns, "", packed(COUNT), [bytes(64)] * COUNT)
    master.learn()
    finished.clear()
    trace = f"00-{'1' * 32}-{'2' * 16}-00"
    with TRACING.under(trace):
        assert client.prefetch(ns, "", packed(COUNT)).wait() is not None
    assert not finished.get_finished_spans() and told == [trace]

"""A request's traceparent, from vLLM's request through both halves to the calls that are made for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.prefetching import Prefetch
from kvstrata.client.results import LoadResult, Lookup, StoreResult
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.scheduler_side import make_scheduler_side
from kvstrata.engine_adapter.connector.worker_side import PoolWorkerSide
from kvstrata.engine_adapter.vllm.block_pool import PoolBlockHolder
from kvstrata.engine_adapter.vllm.requests import RequestView
from kvstrata.engine_adapter.vllm.scheduler import StepPlanner
from kvstrata.engine_adapter.vllm.worker import StepRunner
from kvstrata.transfer.regions import BlockView
from kvstrata.transfer.tracing import TRACE_CHARACTERS_MAX, TRACING
from tests.engine_adapter.connector.scripted_client import WAIT_S, WIDTH, ScriptedClient, layout
from tests.engine_adapter.vllm.stand_ins import BlockPool, BlockState, Request, SchedulerOutput

pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.spans import recorded

T = TypeVar("T")
TRACE, CALLER = "1" * 32, "2" * 16
CALLS = {"kvstrata.lookup", "kvstrata.prefetch", "kvstrata.load", "kvstrata.store"}


class TracedClient(ScriptedClient):
    """A span a call, as the real one makes them. ``told``: what is current in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def lookup(self, namespace: PoolNamespace, cache_salt: str, hashes: bytes, *, request: str = "") -> Lookup:
        with TRACING.span("kvstrata.lookup"):
            self.told.append(TRACING.here())
            return super().lookup(namespace, cache_salt, hashes, request=request)

    def prefetch(self, namespace: PoolNamespace, cache_salt: str, hashes: bytes) -> Prefetch:
        with TRACING.span("kvstrata.prefetch"):
            self.told.append(TRACING.here())
            return super().prefetch(namespace, cache_salt, hashes)

    def load(
        self, namespace: PoolNamespace, cache_salt: str, hashes: bytes, blocks: BlockView, **layered: object
    ) -> LoadResult:
        with TRACING.span("kvstrata.load"):
            self.told.append(TRACING.here())
            return super().load(namespace, cache_salt, hashes, blocks)

    def store(
        self,
        namespace: PoolNamespace,
        cache_salt: str,
        hashes: bytes,
        blocks: BlockView,
        parent: bytes | None,
        first_index: int,
        **layered: object,
    ) -> StoreResult:
        with TRACING.span("kvstrata.store"):
            self.told.append(TRACING.here())
            return super().store(namespace, cache_salt, hashes, blocks, parent, first_index)


class Serving:
    """Both halves as vLLM has them, lookups over the socket; the pool is a dict that has the first two blocks."""

    def __init__(self, endpoint: str, client: TracedClient) -> None:
        self.client, self.layout, self.tables = client, layout(), ([*range(1, 9)],)
        for row in range(2):
            self.client.blocks[(self.layout.groups[0].fingerprint, 0, "", _hash(row))] = bytes(128)
        config = PoolConfig(masters="unused:1", load_policy="always", lookup_deadline_ms=10_000)
        self.side = PoolWorkerSide(self.layout, config, endpoint=endpoint, connect=lambda: client)
        self.runner = StepRunner(self.side, 0, by_blocks=True)
        holder = PoolBlockHolder(BlockPool(64))
        self.planner = StepPlanner(
            make_scheduler_side(self.layout, config, endpoint, holder), aligned_tokens=8, ranks=1
        )

    def serve(self, name: str, headers: dict[str, str] | None) -> None:
        """A request of four blocks: two are loaded, two are computed and stored."""
        hashes = [_hash(row) for row in range(2)] + [_hash(row, name) for row in range(2)]
        request = Request(name, 17, 17, hashes, trace_headers=headers)
        self.planner.on_new_request(request)
        found = _until(lambda: self.planner.get_num_new_matched_tokens(request, 0), lambda found: found[0] is not None)
        assert found == (8, True)
        self.planner.update_state_after_alloc(request, self.tables, 8)
        self._step({})
        _until(lambda: self._step({}), lambda _: not self.planner.has_pending_work())
        request.num_computed_tokens = 8
        self._step({name: 9})
        _until(lambda: self._step({}), lambda _: not self.planner.has_pending_work())
        self.planner.request_finished(request)

    def _step(self, scheduled: dict[str, int]) -> None:
        state = BlockState(dict.fromkeys(scheduled, self.tables))
        self.runner.begin(self.planner.build_connector_meta(SchedulerOutput(scheduled, None, state)))
        self.runner.forward_ended()
        self.runner.transfer_results()
        self.planner.update_connector_output({0: self.runner.report()})

    def close(self) -> None:
        self.planner.close()
        self.runner.close()


def _hash(row: int, name: str = "") -> bytes:
    return f"{name}{row}".encode().ljust(WIDTH, b".")


def _until(ask: Callable[[], T], good: Callable[[T], bool]) -> T:
    deadline = time.monotonic() + WAIT_S
    while not good(found := ask()):
        assert time.monotonic() < deadline, found
        time.sleep(0.001)
    return found


@pytest.fixture
def client() -> TracedClient:
    return TracedClient()


@pytest.fixture
def serving(tmp_path: Path, client: TracedClient) -> Iterator[Serving]:
    made = Serving(f"ipc://{tmp_path}/lookups", client)
    yield made
    made.close()


@pytest.fixture
def finished() -> Iterator[InMemorySpanExporter]:
    with recorded() as exporter:
        yield exporter


def _callers(spans: Sequence[ReadableSpan]) -> set[tuple[str, str, str]]:
    """Name, trace and parent of each."""
    return {
        (span.name, format(span.context.trace_id, "032x"), format(span.parent.span_id, "016x") if span.parent else "")
        for span in spans
    }


def test_lookup_prefetch_load_and_store_of_a_request_are_children_of_its_caller_s_span(
    serving: Serving, finished: InMemorySpanExporter
) -> None:
    finished.clear()  # the probe's
    serving.serve("a", {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"})
    serving.serve("b", {"traceparent": f"00-{'3' * 32}-{'4' * 16}-01"})
    spans = _callers(finished.get_finished_spans())
    assert spans == {(name, *ids) for name in CALLS for ids in ((TRACE, CALLER), ("3" * 32, "4" * 16))}


@pytest.mark.parametrize("headers", [None, {}, {"tracestate": "vendor=1"}, {"traceparent": "nonsense"}])
def test_without_a_traceparent_each_call_is_a_trace_of_its_own(
    serving: Serving, finished: InMemorySpanExporter, headers: dict[str, str] | None
) -> None:
    finished.clear()
    serving.serve("a", headers)
    spans = finished.get_finished_spans()
    assert {span.name for span in spans} == CALLS and all(span.parent is None for span in spans)
    assert len({span.context.trace_id for span in spans}) == len(spans)


def test_a_request_that_is_not_sampled_has_no_spans_and_says_so_to_who_is_called(
    serving: Serving, client: TracedClient, finished: InMemorySpanExporter
) -> None:
    finished.clear()
    client.told.clear()
    serving.serve("a", {"traceparent": f"00-{TRACE}-{CALLER}-00"})
    assert not finished.get_finished_spans()
    assert len(client.told) >= 3 and set(client.told) == {f"00-{TRACE}-{CALLER}-00"}


def test_where_nobody_traces_the_header_is_nothing(serving: Serving, client: TracedClient) -> None:
    serving.serve("a", {"traceparent": f"00-{TRACE}-{CALLER}-01"})
    assert set(client.told) == {""}


def test_what_a_client_sends_as_a_traceparent_is_cut() -> None:
    request = Request("r", 5, 5, [], trace_headers={"traceparent": "x" * 100_000})
    assert len(RequestView(request).trace) == TRACE_CHARACTERS_MAX

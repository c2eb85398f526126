"""vLLM's OpenAI server with tracing on: what the pool does for a request is in the trace that the request came with."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the otel extra is not installed")

from tests.e2e.otlp_receiver import Receiver, Seen
from tests.e2e.traced_pool import TracedPool
from tests.vllm.conftest import draw
from tests.vllm.engine import BLOCK, Prompt, transfer
from tests.vllm.server import ApiServer

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 16 << 20,
    "prefix_caching_hash_algo": "sha256_cbor",
}
BLOCKS = 4
CALLS = ("kvstrata.lookup", "kvstrata.load", "kvstrata.store")


class Caller:
    """A client that traces: each of its requests has a span of its own, whose id is ``span``."""

    def __init__(self, server: ApiServer, receiver: Receiver) -> None:
        self._server, self._receiver, self.span = server, receiver, secrets.token_hex(8)
        self._prompts = iter(draw(20, seed=30, length=BLOCKS * BLOCK + 1))

    def ask(self, prompt: Prompt, flags: str = "01") -> str:
        """One request; its trace."""
        trace = secrets.token_hex(16)
        answer = httpx.post(
            f"{self._server.url}/v1/completions",
            json={"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0},
            headers={"traceparent": f"00-{trace}-{self.span}-{flags}", "tracestate": "vendor=1"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return trace

    def forget(self) -> None:
        """Empty the server's own cache: what is reused from then on comes from the pool."""
        assert httpx.post(f"{self._server.url}/reset_prefix_cache", timeout=30).status_code == 200

    def spans(self, trace: str) -> list[Seen]:
        return [span for span in list(self._receiver.spans) if span.trace == trace]

    def wait(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        self._receiver.wait(condition, seconds)

    def stored_and_loaded(self) -> tuple[str, str]:
        """Traces of a request that stored all its blocks, and of one that loaded them. On a busy machine the pool may
        be away for a while, as it is while the server starts: then another prompt is tried."""
        for prompt in self._prompts:
            stored = self.ask(prompt)
            if not self._seen(stored, "kvstrata.store", "stored"):
                continue
            self.forget()
            loaded = self.ask(prompt)
            if self._seen(loaded, "kvstrata.load", "loaded"):
                return stored, loaded
        raise AssertionError([span for span in self._receiver.spans if span.name in CALLS])

    def _seen(self, trace: str, name: str, status: str) -> bool:
        """Whether such a span of all blocks comes, in one that has also the request's own."""

        def there() -> bool:
            spans = self.spans(trace)
            done = {span.facts.get(f"kvstrata.status.{status}") for span in spans if span.name == name}
            return BLOCKS in done and "llm_request" in {span.name for span in spans}

        try:
            self.wait(there, 10.0)
        except AssertionError:
            return False
        return True


@pytest.fixture
def caller(model: Path, tmp_path: Path) -> Iterator[Caller]:
    receiver = Receiver()
    pool = TracedPool(tmp_path, receiver.url)
    options = OPTIONS | {
        "kv_transfer_config": transfer(pool.address),
        "otlp_traces_endpoint": f"{receiver.url}/v1/traces",
    }
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "vllm",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    server = None
    try:
        server = ApiServer(tmp_path / "server.log", model, options, environment)
        yield Caller(server, receiver)
    finally:
        if server is not None:
            server.end()
        pool.end()
        receiver.close()


def test_a_traceparent_goes_on_to_the_pool_and_what_is_not_sampled_has_no_spans(caller: Caller) -> None:
    stored, loaded = caller.stored_and_loaded()
    caller.forget()
    unsampled = [caller.ask(prompt, flags="00") for prompt in draw(2, seed=31)]
    last, _ = caller.stored_and_loaded()
    for trace in (stored, loaded, last):

        def whole(trace: str = trace) -> bool:
            """Nothing of it is still to come: each process's spans are there, and so is whatever was above them."""
            spans = caller.spans(trace)
            above = {span.span for span in spans} | {caller.span}
            services = {span.service for span in spans}
            return services == {"vllm", "kvstrata-master", "kvstrata-node"} and all(s.parent in above for s in spans)

        caller.wait(whole)
        ours = [span for span in caller.spans(trace) if span.name in CALLS]
        assert "kvstrata.lookup" in {span.name for span in ours}
        assert all(span.parent == caller.span and span.service == "vllm" for span in ours), ours
    # Each process sends in order: what it had made for these would have come before its last.
    assert not [span for trace in unsampled for span in caller.spans(trace)]

"""The other routes: models, tokens, health, metrics, cache."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstrata.engine_adapter.paged.stats import EngineStats
from kvstrata.engine_adapter.paged.text.chat import render_chat
from kvstrata.transfer.tracing import TRACE_CHARACTERS_MAX


def samples(bench: Any) -> dict[str, float]:
    """Metric and labels but the constant ones, as ``name{source=...}``, to value."""
    found = {}
    for family in text_string_to_metric_families(bench.get("/metrics").text):
        if family.name.startswith(("process_", "kvstrata_")):
            continue  # of the process and of its clients
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
            found[sample.name + "".join(f"{{{name}={value}}}" for name, value in labels.items())] = sample.value
    return found


def test_models(bench: Any) -> None:
    card = bench.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 4096)
    assert bench.get("/v1/models/tiny").json() == card
    assert bench.get("/v1/models/a/b").status_code == 404


def test_tokens_there_and_back(bench: Any) -> None:
    given = bench.post("/tokenize", {"model": "tiny", "prompt": "hé", "return_token_strs": True}).json()
    assert given == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "token_id:195", "token_id:169"],
    }
    assert bench.post("/detokenize", {"tokens": given["tokens"]}).json() == {"prompt": "hé"}
    assert bench.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert bench.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_a_chat_is_tokenized_as_it_would_be_served(bench: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = bench.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert bytes(tokens).decode() == render_chat(messages)
    bench.chat(messages=messages)
    assert bench.engine.submitted[0][0] == tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [512]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_wrong_tokens(bench: Any, path: str, body: dict[str, object]) -> None:
    assert bench.post(path, body).status_code == 400


def test_health_follows_the_engine(bench: Any) -> None:
    assert bench.get("/health").status_code == bench.get("/readyz").status_code == 200
    bench.engine.problem = "no progress for 30 s"
    health = bench.get("/health")
    assert health.status_code == 503 and health.json()["problem"] == "no progress for 30 s"
    ready = bench.get("/readyz")
    assert ready.status_code == 503 and "no progress" in ready.text


def test_a_server_that_drains_is_alive_and_not_ready(bench: Any) -> None:
    bench.service.drain()
    assert bench.get("/health").status_code == 200 and bench.get("/readyz").status_code == 503
    answer = bench.complete()
    assert answer.status_code == 503 and "stopping" in answer.json()["error"]["message"]


def test_version(bench: Any) -> None:
    assert bench.get("/version").json() == {"version": version("kvstrata")}


def test_the_cache_is_reset_only_where_that_is_allowed(bench: Any, make_bench: Any) -> None:
    assert bench.request("POST", "/reset_prefix_cache").status_code == 404 and bench.engine.resets == 0
    allowed = make_bench(allow_reset=True)
    assert allowed.request("POST", "/reset_prefix_cache").status_code == 200 and allowed.engine.resets == 1
    assert allowed.engine.external_resets == 0
    assert allowed.request("POST", "/reset_prefix_cache?reset_external=true").status_code == 200
    assert (allowed.engine.resets, allowed.engine.external_resets) == (2, 1)
    refused = allowed.request("POST", "/reset_prefix_cache?reset_external=perhaps")
    assert refused.status_code == 400 and "reset_external" in refused.text and allowed.engine.resets == 2
    allowed.engine.in_use = True
    assert allowed.request("POST", "/reset_prefix_cache").status_code == 409


def test_metrics_have_vllms_names_from_the_start(bench: Any) -> None:
    found = samples(bench)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "external_prefix_cache_queries_total",
        "external_prefix_cache_hits_total",
        "prompt_tokens_cached_total",
        "prompt_tokens_by_source_total{source=local_compute}",
        "prompt_tokens_by_source_total{source=local_cache_hit}",
        "prompt_tokens_by_source_total{source=external_kv_transfer}",
        "request_success_total{finished_reason=stop}",
        "time_to_first_token_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_prompt_tokens_count",
    ):
        assert found[f"vllm:{name}"] == 0, name


def test_metrics_are_the_engines_and_the_servers(bench: Any) -> None:
    bench.engine.current = EngineStats(
        running=3,
        waiting=4,
        kv_usage=0.5,
        prompt_tokens=100,
        prompt_tokens_by_source={"computed": 60, "local_cache_hit": 30, "external_kv_transfer": 10},
        external_prefix_cache_hits=10,
        connector={"loads": 2.0},
    )
    bench.complete(prompt="four")
    bench.complete(stop="w")
    bench.complete(max_tokens=1)
    found = samples(bench)
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (3, 4)
    assert found["vllm:kv_cache_usage_perc"] == 0.5
    assert found["vllm:prompt_tokens_by_source_total{source=local_compute}"] == 60
    assert found["vllm:prompt_tokens_cached_total"] == 40
    assert found["kvstrata:connector_loads"] == 2
    assert found["vllm:request_success_total{finished_reason=stop}"] == 2
    assert found["vllm:request_success_total{finished_reason=length}"] == 1
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:e2e_request_latency_seconds_count"] == 3
    assert found["vllm:request_prompt_tokens_sum"] == 4 + 2 + 2
    assert found["vllm:request_generation_tokens_sum"] == 12 + len("hello w") + 1
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_traceparent_goes_to_the_engine_cut_to_what_is_read_of_one(bench: Any, route: str, stream: bool) -> None:
    said = {"prompt": "hi"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    trace = f"00-{'1' * 32}-{'2' * 16}-01"
    for headers in ({"traceparent": trace}, {}, {"traceparent": trace + "-" + "x" * 4000}):
        bench.post(route, {"model": "tiny", "stream": stream, **said}, headers=headers)
    first, without, cut = bench.engine.traces
    assert (first, without) == (trace, "") and cut.startswith(trace) and len(cut) == TRACE_CHARACTERS_MAX


def test_where_clients_are_not_to_decide_a_traceparent_is_ignored(make_bench: Any) -> None:
    deaf = make_bench(ignore_traceparent=True)
    deaf.post("/v1/completions", {"prompt": "hi"}, headers={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    assert deaf.engine.traces == [""]

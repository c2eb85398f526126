"""``kvstrata serve`` as a user starts it: real process, real engine, real sockets."""

from __future__ import annotations

import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstrata.cli.cluster import Cluster, Plan
from kvstrata.cli.serve import serve
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.transfer.security.tls import client_context
from tests.certificates import Authority
from tests.waiting import until

FREE = "127.0.0.1:0"
Start = Callable[..., "Server"]
SMALL = ("--model", "tiny", "--kv-memory", "8MiB", "--listen", FREE)


class Server:
    """A child that said it is ready, and a client for it."""

    def __init__(self, child: subprocess.Popen[str], ready: dict[str, Any]) -> None:
        self.child, self.ready = child, ready
        self.http = httpx.Client(base_url=f"http://{ready['http']}", timeout=30)

    def complete(self, prompt: str, **more: object) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def metric(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        raise AssertionError(f"no {name}")

    def end(self) -> int:
        self.http.close()
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server, wait for its ready line; whatever is left at the end is told to go, then killed, by pid."""
    servers: list[Server] = []
    # Its own temporary folder, to see what is left in it.
    folder = tmp_path / "tmp"
    folder.mkdir()

    def begin(*arguments: str, **environment: str) -> Server:
        command = [sys.executable, "-m", "kvstrata.cli.app", "serve", *arguments, "--log-format", "json"]
        env = {**os.environ, "TMPDIR": str(folder), **environment}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
        assert child.stdout is not None
        if not select.select([child.stdout], [], [], 60)[0]:
            child.kill()
            child.wait(10)
            raise AssertionError("no ready line in time")
        servers.append(Server(child, json.loads(child.stdout.readline())))
        return servers[-1]

    yield begin
    for server in servers:
        server.http.close()
        if server.child.poll() is None:
            server.child.terminate()
        try:
            server.child.wait(20)
        except subprocess.TimeoutExpired:
            server.child.kill()
            server.child.wait(10)
        if server.child.stdout is not None:
            server.child.stdout.close()


def test_a_server_answers_counts_and_ends(start: Start, tmp_path: Path) -> None:
    shm = set(Path("/dev/shm").iterdir())
    server = start(*SMALL)
    assert (server.ready["event"], server.ready["role"], server.ready["model"]) == ("ready", "engine", "tiny")
    assert server.ready["pid"] == server.child.pid
    assert server.http.get("/health").status_code == server.http.get("/readyz").status_code == 200

    prompt = "The pool keeps what any engine has computed, so that no engine computes it twice. " * 2
    first, second = server.complete(prompt), server.complete(prompt)
    assert first["choices"] == second["choices"] and first["usage"]["completion_tokens"] == 8
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["kvstrata"]["local_cached_tokens"] == len(prompt) // 16 * 16
    other = server.complete(prompt, cache_salt="somebody else")
    assert other["choices"] == first["choices"] and other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    whole = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    streamed = server.http.post("/v1/chat/completions", json={**body, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert streamed.endswith("data: [DONE]\n\n")

    assert server.metric("vllm:prompt_tokens_by_source_total", source="local_cache_hit") >= len(prompt) // 16 * 16
    assert server.metric("vllm:generation_tokens_total") >= 24
    assert server.metric("vllm:request_success_total", finished_reason="length") >= 4
    assert server.metric("vllm:num_requests_running") == 0
    assert server.end() == 0
    assert set(Path("/dev/shm").iterdir()) <= shm and list((tmp_path / "tmp").iterdir()) == []


def test_an_answer_under_way_is_cut_after_the_grace_and_reaches_its_client(start: Start) -> None:
    server = start(*SMALL, "--grace", "0", "--enable-reset")
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        assert server.http.post("/reset_prefix_cache").status_code == 409, "its blocks are in use"
        server.child.send_signal(signal.SIGTERM)
        *_, last, done = lines
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert done == "data: [DONE]" and server.child.wait(30) == 0


def test_a_client_that_leaves_frees_the_engine(start: Start) -> None:
    server = start(*SMALL, "--max-num-seqs", "1")
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.http.base_url}/v1/completions", json=body, timeout=30) as answer:
        next(answer.iter_lines())
    # One request at a time fits: this one is served because the other has ended.
    assert server.complete("b")["usage"]["completion_tokens"] >= 1
    assert server.metric("vllm:request_success_total", finished_reason="abort") == 1


def test_two_ranks_a_key_and_a_file_of_options(start: Start, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        "serve:\n  model: tiny\n  tensor-parallel: 2\n  kv-memory: 8MiB\n  served-model-name: our-model\n"
    )
    server = start("--config", str(config), "--listen", FREE, KVSTRATA_SERVE_API_KEY="k")
    assert server.http.get("/v1/models").status_code == 401
    server.http.headers["authorization"] = "Bearer k"
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "our-model"
    assert server.complete("hello", model="our-model")["usage"]["completion_tokens"] >= 1
    assert server.end() == 0


def test_many_clients_at_once_get_what_each_gets_alone(start: Start) -> None:
    server = start(*SMALL)
    prompts = [f"prompt number {index} " * (index + 1) for index in range(12)]
    alone = [server.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    together: dict[int, str] = {}

    def ask(index: int) -> None:
        together[index] = server.complete(prompts[index], cache_salt="fresh")["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together.get(index) for index in range(len(prompts))] == alone


def test_what_one_engine_computed_another_one_loads(start: Start, tmp_path: Path) -> None:
    cluster = Cluster(Plan(tmp_path, nodes=1, dram_bytes=64 << 20))
    try:
        assert cluster.start(lambda seconds: False)
        pool = ("--pool", str(cluster.ready()["master"]), "--load-policy", "always")
        one, two = start(*SMALL, *pool), start(*SMALL, *pool)
        prompt = "A prefix that any engine has computed is loaded by every other one. " * 4 + "Go on."
        blocks = len(prompt) // 16 * 16
        first = one.complete(prompt)
        until(lambda: one.metric("kvstrata:connector_store_blocks") >= blocks // 16)
        second = two.complete(prompt)
        assert second["choices"] == first["choices"]
        assert second["usage"]["kvstrata"] == {"local_cached_tokens": 0, "external_cached_tokens": blocks}
        assert two.metric("vllm:external_prefix_cache_hits_total") == blocks
        assert two.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == blocks
        assert one.end() == two.end() == 0
    finally:
        cluster.stop()


def test_without_its_pool_a_server_serves(start: Start) -> None:
    server = start(*SMALL, "--pool", "127.0.0.1:1")
    assert server.complete("hello")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.http.get("/health").status_code == 200


def test_with_a_certificate_a_server_answers_by_tls_alone(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    pair = authority.pair("engine")
    server = start(*SMALL, "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    context = client_context(authority.ca)
    assert httpx.get(f"https://{server.ready['http']}/health", verify=context).status_code == 200
    with pytest.raises(httpx.TransportError):
        server.http.get("/health")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--tokenizer", "nowhere.json"], "nowhere.json"),
        (["--kv-memory", "1KiB"], "1024 bytes"),
        (["--max-model-len", "100000"], "100000"),
        (["--tls-cert", "nowhere.pem"], "go together"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_is_said(arguments: list[str], said: str) -> None:
    code, text = refused(*arguments, "--listen", FREE)
    assert (code, said in text, "Traceback" in text) == (2, True, False), text


def test_a_port_in_use_is_known_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, text = refused("--model", "nowhere", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert code == 2 and "in use" in text


def refused(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "kvstrata.cli.app", "serve", *arguments]
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    return done.returncode, done.stderr


def test_loads_by_layer_are_asked_for() -> None:
    default = inspect.signature(serve).parameters["layered_loads"].default
    assert default.value == PoolConfig().layered_loads == "never"
    assert inspect.signature(serve).parameters["layered_stores"].default is PoolConfig().layered_stores is False


def test_a_device_that_is_not_there_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('none here')")
    command = [sys.executable, "-m", "kvstrata.cli.app", "serve", *SMALL, "--device", "cuda"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert ended.returncode == 2
    assert "install kvstrata[gpu]" in ended.stderr and "Traceback" not in ended.stderr

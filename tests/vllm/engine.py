"""A real vLLM engine in a child process, spoken to from a test."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm.ending import end_all

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 32  #: tokens; vLLM on a CPU wants multiples of it
START_S = 240.0
ANSWER_S = 120.0

#: Counters of the connector that say that the pool was not asked, or not in time.
AWAY = ("pool_lost", "lookups_absent", "lookups_late")

Prompt = list[int]

#: One thread an engine, no usage reports, no model hub: engines share a small machine and have no network.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


def free_address() -> str:
    """A loopback address nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Lora(NamedTuple):
    """An adapter as vLLM is asked for it."""

    name: str
    number: int
    path: str


class Answer(NamedTuple):
    """One entry a prompt. ``tokens`` is None for one that was aborted; ``cached`` counts prompt tokens that were
    not computed, from the engine's own cache or the pool."""

    tokens: list[Prompt | None]
    cached: list[int | None]
    ttft_s: list[float | None]
    seconds: float


def arguments(model: Path, **changed: Any) -> dict[str, Any]:
    """Of ``vllm.LLM``: small, deterministic, quick to start. float32, for tokens that can be compared."""
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "seed": 0,
        "block_size": BLOCK,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 16 << 20,
        "prefix_caching_hash_algo": "sha256_cbor",
        "disable_log_stats": False,
    } | changed


def transfer(masters: str, *, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """``kv_transfer_config`` with a pool. Loads whatever it costs: on a model this small computing is faster.
    Lookups may take long: a busy machine is not what is tested.

    ``role``: kv_consumer loads only. ``extra``: more of ``kv_connector_extra_config``.
    """
    extra = {"masters": masters, "load_policy": "always", "lookup_deadline_ms": 5_000} | extra
    return {
        "kv_connector": "KVStrataConnector",
        "kv_connector_module_path": "kvstrata.engine_adapter.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


class VllmEngine:
    """One child process. Every call has a deadline and fails with the end of the child's log."""

    def __init__(self, log: Path, wanted: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine_child"],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=os.environ | ENVIRONMENT | (environment or {}),
            )  # fmt: skip
        try:
            self._ask(wanted, START_S)
        except BaseException:
            self.end()
            raise

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 8,
        salt: str = "",
        abort_while_loading: bool = False,
        adapter: Lora | None = None,
        sound_seed: int | None = None,
        image_seeds: Sequence[int] = (),
    ) -> Answer:
        """All at once, greedily. ``sound_seed``, ``image_seeds``: of the random sound, or images, that all of them
        have."""
        asked = {
            "op": "generate",
            "prompts": list(prompts),
            "max_tokens": max_tokens,
            "salt": salt,
            "abort_while_loading": abort_while_loading,
            "adapter": adapter,
            "sound_seed": sound_seed,
            "image_seeds": list(image_seeds),
        }
        return Answer(**self._ask(asked, ANSWER_S))

    def generate_with_pool(self, prompts: Sequence[Prompt], **asked: Any) -> Answer:
        """As :meth:`generate`, and once more where the pool was away meanwhile: on a busy machine it may seem so. The
        engine keeps nothing in between, and all that it stores is stored at the end."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            before = self.counters()
            answer = self.generate(prompts, **asked)
            self.settle()
            after = self.counters()
            if after["pool_ready"] and all(before[name] == after[name] for name in AWAY):
                return answer
            assert time.monotonic() < deadline, after
            self.forget()

    def groups(self) -> list[tuple[str, int]]:
        """Of each KV cache group: vLLM's name of what its layers attend to, and how many they are."""
        return [(kind, int(layers)) for kind, layers in self._ask({"op": "groups"}, ANSWER_S)]

    def settle(self) -> None:
        """Wait until nothing holds a block; a block that stays taken fails the test."""
        found = self._ask({"op": "settle"}, ANSWER_S)
        assert found["free"] == found["of"], found

    def forget(self) -> None:
        """Empty the engine's own cache."""
        assert self._ask({"op": "forget"}, ANSWER_S)["done"]

    def pause(self) -> str:
        """Pause and go on, with all caches cleared as vLLM does by default; what is wrong, or an empty string."""
        return str(self._ask({"op": "pause"}, ANSWER_S)["problem"])

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self._ask({"op": "metrics"}, ANSWER_S)
        return found

    def wait_attached(self) -> None:
        """Until the pool answers its lookups: an engine that is just starting takes what it cannot ask for a miss."""
        deadline = time.monotonic() + ANSWER_S
        token = 3
        while not self.counters()["lookups_answered"]:
            assert time.monotonic() < deadline, self.counters()
            self.generate([[token] * (4 * BLOCK + 1)], max_tokens=1)  # a block, also at vLLM's default size
            token += 1
        self.settle()

    def counters(self) -> dict[str, float]:
        """Of the connector: see docs/engine.md, ``kvstrata:connector_*``."""
        found: dict[str, float] = self._ask({"op": "counters"}, ANSWER_S)
        return found

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End well: connectors are shut down, and the process leaves by itself."""
        self._ask({"op": "stop"}, ANSWER_S)
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0, self.log()[-3000:]
        self.end()

    def end(self) -> None:
        """At once, with the processes that it started."""
        end_all(self.process)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                stream.close()

    def _ask(self, command: dict[str, Any], seconds: float) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        descriptor, data = self.process.stdout.fileno(), b""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while not data.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                part = os.read(descriptor, 1 << 20) if ready else b""
                if not part:
                    raise AssertionError(self._why(command.get("op", "start"), seconds, hung=not ready))
                data += part
        return json.loads(data)

    def _why(self, operation: str, seconds: float, *, hung: bool) -> str:
        if hung:
            self.process.send_signal(signal.SIGABRT)  # faulthandler, where vLLM installed it, says where it stands
        self.process.wait(10)
        what = f"no answer in {seconds:.0f} s" if hung else f"the engine died ({self.process.returncode})"
        return f"{operation}: {what}; its log ends:\n{self.log()[-6000:]}"

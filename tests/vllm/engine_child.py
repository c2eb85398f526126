"""A process with one real vLLM engine: jobs come in as JSON lines on stdin, answers go out on stdout.

The first line is the arguments of ``vllm.LLM``. What vLLM prints goes to stderr. The engine runs in this process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so that a test can look into its scheduler.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

SETTLE_S = 30.0


class Engine:
    """The operations that tests ask for; each takes and returns what JSON can carry."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = arguments.pop("kv_transfer_config", None)
        if transfer is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._outer: dict[str, str] = {}  # vLLM's own name of a request -> the name that outputs carry

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str = "",
        abort_while_loading: bool = False,
        adapter: list[Any] | None = None,
        sound_seed: int | None = None,
        image_seeds: list[int] | None = None,
    ) -> dict[str, Any]:
        """All prompts at once, greedily. ``abort_while_loading``: the first is aborted when its load is under way."""
        began = time.perf_counter()
        media = _media(sound_seed, image_seeds or [])
        names = [self._add(prompt, max_tokens, salt, adapter, media) for prompt in prompts]
        first: dict[str, float] = {}
        outputs: dict[str, Any] = {}
        aborted = False
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                first.setdefault(output.request_id, time.perf_counter() - began)
                if output.finished:
                    outputs[output.request_id] = output
            if abort_while_loading and not aborted and names[0] in self._loading():
                self._engine.abort_request([names[0]], internal=True)
                aborted = True
        assert aborted == abort_while_loading, "the load was never seen under way"
        rows = [outputs.get(self._outer[name]) for name in names]
        return {
            "tokens": [list(row.outputs[0].token_ids) if row is not None else None for row in rows],
            "cached": [row.num_cached_tokens if row is not None else None for row in rows],
            "ttft_s": [first.get(self._outer[name]) for name in names],
            "seconds": time.perf_counter() - began,
        }

    def _add(
        self, prompt: list[int], max_tokens: int, salt: str, adapter: list[Any] | None, media: dict[str, Any]
    ) -> str:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        outer = f"request-{len(self._outer)}"
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        asked: dict[str, Any] = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        if media:
            asked["multi_modal_data"] = media
        lora = LoRARequest(*adapter) if adapter is not None else None
        name: str = self._engine.add_request(outer, asked, parameters, lora_request=lora)
        self._outer[name] = outer
        return name

    def _loading(self) -> set[str]:
        """Requests whose blocks a connector is filling."""
        from vllm.v1.request import RequestStatus

        waits = RequestStatus.WAITING_FOR_REMOTE_KVS
        return {name for name, request in self._scheduler.requests.items() if request.status == waits}

    def groups(self) -> list[list[str]]:
        """Of each KV cache group: what its layers attend to, and how many they are."""
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return [[type(group.kv_cache_spec).__name__, str(len(group.layer_names))] for group in groups]

    def settle(self) -> dict[str, Any]:
        """Step on until every block is free again: loads, saves and aborted requests have let go of theirs."""
        pool = self._scheduler.kv_cache_manager.block_pool
        every = pool.num_gpu_blocks - 1  # block 0 is the null block
        deadline = time.monotonic() + SETTLE_S
        while pool.get_num_free_blocks() != every and time.monotonic() < deadline:
            self._engine.step()
            time.sleep(0.002)
        return {"free": pool.get_num_free_blocks(), "of": every, "requests": sorted(self._scheduler.requests)}

    def forget(self) -> dict[str, Any]:
        """Drop the engine's own cached blocks: what is reused from now on came from outside."""
        return {"done": bool(self._llm.reset_prefix_cache())}

    def pause(self) -> dict[str, Any]:
        """What a server does for ``/pause``, and for ``/sleep`` before memory is given back; then ``/resume``."""
        core = self._engine.engine_core.engine_core
        problem = ""
        try:
            core.pause_scheduler(mode="abort", clear_cache=True)
        except RuntimeError as error:
            problem = str(error)
        core.resume_scheduler()
        return {"problem": problem}

    def metrics(self) -> dict[str, float]:
        """Counters by name and the labels that tell them apart; engine and model names left out."""
        self._engine.do_log_stats()
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
            name = metric.name + ("{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}" if labels else "")
            value = getattr(metric, "value", None)
            if value is not None:
                found[name] = float(value)
        return found

    def counters(self) -> dict[str, float]:
        """The connector's own, of the scheduler's half; under MultiConnector, of the child that is ours."""
        connector = self._scheduler.connector
        ours = [each for each in getattr(connector, "sub_connectors", [connector]) if hasattr(each, "_planner")]
        found: dict[str, float] = ours[0]._planner.stats()
        return found

    def stop(self) -> dict[str, Any]:
        """What vLLM does when its process ends well: connectors are shut down."""
        self._engine.engine_core.shutdown()
        return {}


def _media(sound_seed: int | None, image_seeds: list[int]) -> dict[str, Any]:
    """As vLLM takes them beside a prompt."""
    sounds = {"audio": _sound(sound_seed)} if sound_seed is not None else {}
    return sounds | ({"image": [_image(seed) for seed in image_seeds]} if image_seeds else {})


def _image(seed: int) -> Any:
    """Four rectangles of random colours, wider than high."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), np.uint8)
    return Image.fromarray(pixels.repeat(6, 0).repeat(8, 1))


def _sound(seed: int) -> Any:
    """Two seconds of noise, and its samples a second."""
    import numpy as np

    return np.random.default_rng(seed).standard_normal(32_000).astype(np.float32), 16_000


def serve(commands: Iterator[str], answers: TextIO) -> None:
    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    engine = Engine(json.loads(next(commands)))
    answer({"ready": True})
    for line in commands:
        command = json.loads(line)
        operation = command.pop("op")
        answer(getattr(engine, operation)(**command))
        if operation == "stop":
            return


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its libraries may print: that is not an answer
    serve(iter(sys.stdin.readline, ""), private)

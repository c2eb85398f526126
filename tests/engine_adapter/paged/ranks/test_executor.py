"""Ranks as processes: the same tokens as one process, and every way in which a rank can be lost."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvstrata.engine_adapter.connector.base import ConnectorMeta, GroupBlocks, Job, JobKind
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.paged.config import CacheConfig, EngineConfig, ModelConfig
from kvstrata.engine_adapter.paged.outputs import ModelRunnerOutput, NewRequest, SchedulerOutput, TokenLogprobs
from kvstrata.engine_adapter.paged.ranks.executor import Executor, InProcessExecutor, make_executor
from kvstrata.engine_adapter.paged.ranks.process_executor import ProcessExecutor
from kvstrata.engine_adapter.paged.ranks.rank_messages import ToRank
from kvstrata.engine_adapter.paged.ranks.rank_process import RankProcess
from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.proto.errors import Closed, InvalidArgument, Unavailable
from tests.engine_adapter.paged.played_steps import Steps
from tests.processes import alive
from tests.waiting import until

LONG_S = 30.0


def config(ranks: int, model: str = "tiny", pool: PoolConfig | None = None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model, max_model_len=400),
        cache=CacheConfig(num_blocks=120),
        pool=pool or PoolConfig(),
        tensor_parallel=ranks,
    )


def open_fds() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


@pytest.fixture(scope="module")
def two() -> Iterator[Executor]:
    """One executor of two ranks for the tests that do it no harm."""
    executor = make_executor(config(2))
    yield executor
    executor.close()


@pytest.fixture
def victim() -> Iterator[ProcessExecutor]:
    before = open_fds()
    executor = ProcessExecutor(config(2), silent_s=LONG_S)
    pids = [process.pid for process in executor.ranks]
    yield executor
    executor.close()
    assert not any(alive(pid) for pid in pids)
    del executor
    assert open_fds() <= before


REQUESTS = {
    "a": (list(range(130)), SamplingParams(max_tokens=5, logprobs=20)),
    "b": (list(range(300, 317)), SamplingParams(max_tokens=5, logprobs=20)),
    "c": ([7] * 40, SamplingParams(max_tokens=5, logprobs=20, temperature=1.0, seed=4)),
}


def played(
    executor: Executor, seed: int, chunk_max: int
) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]]]:
    """Output tokens and log probabilities of all requests under one schedule."""

    def execute(output: SchedulerOutput) -> ModelRunnerOutput:
        results = executor.execute(output)
        assert all(result.sampled == results[0].sampled for result in results)
        return results[0]

    steps = Steps(execute, executor.kv_config, seed)
    for request_id, (tokens, sampling) in REQUESTS.items():
        steps.add(request_id, tokens, sampling)
    outputs = steps.run(chunk_max=chunk_max)
    steps.execute(SchedulerOutput(step_id=0, finished=list(REQUESTS)))
    logprobs: dict[str, list[TokenLogprobs]] = {}
    for result in steps.results:
        for request_id, found in result.logprobs.items():
            logprobs.setdefault(request_id, []).append(found)
    return outputs, logprobs


def test_two_ranks_say_what_one_says(two: Executor) -> None:
    one = make_executor(config(1))
    assert isinstance(one, InProcessExecutor) and isinstance(two, ProcessExecutor)
    assert (two.vocab_size, two.eos_token_id, two.max_model_len) == (512, 257, 400)
    assert two.kv_config.block_bytes * 2 == one.kv_config.block_bytes
    assert (two.layout.shard_count, one.layout.shard_count) == (2, 1)
    outputs, logprobs = played(two, 1, 64)
    expected, expected_logprobs = played(one, 1, 64)
    one.close()
    assert outputs == expected
    for request_id, rows in expected_logprobs.items():
        for row, found in zip(rows, logprobs[request_id], strict=True):
            np.testing.assert_allclose([value for _, value in found.top], [value for _, value in row.top], atol=1e-4)


def test_two_ranks_give_the_same_bits_under_every_schedule(two: Executor) -> None:
    whole = played(two, 0, 400)
    for seed, chunk_max in ((1, 5), (2, 16), (3, 100)):
        assert played(two, seed, chunk_max) == whole


def test_a_rank_killed_in_a_step_is_named_and_nobody_is_left(victim: ProcessExecutor) -> None:
    pids = [process.pid for process in victim.ranks]
    os.kill(pids[1], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(played, victim, 0, 400)
        until(lambda: victim._group.progress()[0] > 0)  # rank 0 waits for rank 1 in the middle of the model
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(Unavailable, match=rf"rank 1 \(pid {pids[1]}\) was ended by SIGKILL"):
            step.result(LONG_S)
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(Unavailable, match="rank 1"):
        victim.execute(SchedulerOutput(step_id=9))
    victim.close()


def test_the_rank_that_was_lost_is_named_and_not_the_one_that_says_so(
    victim: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has reported and ended before anything is read: its report comes first."""
    first, second = (process.pid for process in victim.ranks)
    os.kill(second, signal.SIGSTOP)
    send = victim._send

    def send_and_lose(processes: Sequence[RankProcess], message: ToRank) -> None:
        send(processes, message)
        os.kill(second, signal.SIGKILL)
        until(lambda: not alive(first))

    monkeypatch.setattr(victim, "_send", send_and_lose)
    with pytest.raises(Unavailable, match=rf"^rank 1 \(pid {second}\) was ended by SIGKILL"):
        played(victim, 0, 400)


def test_a_rank_killed_between_steps_is_named(victim: ProcessExecutor) -> None:
    pid = victim.ranks[0].pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match=rf"rank 0 \(pid {pid}\) was ended by SIGKILL"):
        victim.execute(SchedulerOutput(step_id=1))


def test_a_silent_rank_is_named() -> None:
    executor = ProcessExecutor(config(2), silent_s=0.3)
    pids = [process.pid for process in executor.ranks]
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(Unavailable, match=r"^rank 1 \(pid \d+\) made no progress for 0.3 s"):
        played(executor, 0, 400)
    executor.close()
    assert not any(alive(pid) for pid in pids)


def test_a_step_that_does_not_fit_ends_the_ranks_with_the_reason(victim: ProcessExecutor) -> None:
    with pytest.raises(Unavailable, match=r"rank \d \(pid \d+\): AssertionError: request 'x' is not known") as first:
        victim.execute(SchedulerOutput(step_id=1, num_scheduled_tokens={"x": 1}))
    with pytest.raises(Unavailable) as again:
        victim.execute(SchedulerOutput(step_id=2))
    assert str(again.value) == str(first.value)


def test_a_model_that_is_none_is_the_callers_mistake() -> None:
    before = open_fds()
    with pytest.raises(InvalidArgument, match="'nothing'"):
        make_executor(config(2, "nothing"))
    with pytest.raises(InvalidArgument, match="tensor_parallel is 0"):
        make_executor(config(0))
    assert open_fds() <= before


def test_what_a_rank_said_last_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 4\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(Unavailable, match=r"(?s)rank \d \(pid \d+\) exited with code 4.*no such library"):
        make_executor(config(2))


def test_closing_is_orderly_and_final(victim: ProcessExecutor) -> None:
    processes = list(victim.ranks)
    victim.close()
    assert [process._process.returncode for process in processes] == [0, 0]
    victim.close()
    with pytest.raises(Closed):
        victim.execute(SchedulerOutput(step_id=1))
    one = make_executor(config(1))
    one.close()
    one.close()
    with pytest.raises(Closed):
        one.execute(SchedulerOutput(step_id=1))


ENGINE = """
import msgspec, os, signal, sys, threading, time
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.outputs import SchedulerOutput
from kvstrata.engine_adapter.paged.ranks.process_executor import ProcessExecutor
executor = ProcessExecutor(msgspec.json.decode(sys.argv[1].encode(), type=EngineConfig))
os.kill(executor.ranks[1].pid, signal.SIGSTOP)
step = msgspec.json.decode(sys.argv[2].encode(), type=SchedulerOutput)
threading.Thread(target=executor.execute, args=[step], daemon=True).start()
while not executor._group.progress()[0]:
    time.sleep(0.01)
print(*(process.pid for process in executor.ranks), flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_their_engine_also_in_a_step() -> None:
    new = NewRequest(
        request_id="a",
        token_ids=[1, 2],
        num_prompt_tokens=2,
        sampling=SamplingParams(),
        block_ids=([1],),
        num_computed_tokens=0,
    )
    step = SchedulerOutput(step_id=1, new=[new], num_scheduled_tokens={"a": 2})
    arguments = [msgspec.json.encode(config(2)).decode(), msgspec.json.encode(step).decode()]
    command = [sys.executable, "-c", ENGINE, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        waiting, stopped = (int(word) for word in engine.stdout.readline().split())
        assert alive(waiting) and alive(stopped)
        engine.kill()
    try:
        until(lambda: not alive(waiting))
    finally:
        os.kill(stopped, signal.SIGCONT)
    until(lambda: not alive(stopped))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_idle_engine_is_woken_by_an_outcome(ranks: int) -> None:
    """With a pool that is not there: the load ends as not loaded, on every rank."""
    pool = PoolConfig(masters="127.0.0.1:1", load_deadline_ms=500)
    executor = make_executor(config(ranks, pool=pool))
    try:
        groups = [GroupBlocks(group=0, hashes=bytes(64), block_ids=[1, 2])]
        job = Job(job_id=5, kind=JobKind.LOAD, request_id="a", cache_salt="", groups=groups, deadline_s=0.5)
        output = SchedulerOutput(step_id=1, connector_meta=ConnectorMeta(loads=[job]))
        found = [[] if end.connector is None else end.connector.outcomes for end in executor.execute(output)]
        assert len(executor.wake_fds()) == ranks
        for fd in executor.wake_fds():  # also where the step itself brought the outcome
            assert select.select([fd], [], [], LONG_S)[0], "nobody woke the engine"
        step_id = 1
        while not all(found):
            step_id += 1
            for outcomes, end in zip(found, executor.execute(SchedulerOutput(step_id=step_id)), strict=True):
                outcomes += [] if end.connector is None else end.connector.outcomes
        assert [[(outcome.job_id, outcome.done) for outcome in outcomes] for outcomes in found] == [
            [(5, b"\0\0")] for _ in range(ranks)
        ]
        executor.execute(SchedulerOutput(step_id=step_id + 1))
        assert not select.select(executor.wake_fds(), [], [], 0)[0]
    finally:
        executor.close()

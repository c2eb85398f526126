"""The engine's own thread: orders in, outputs out, and how it ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from kvstrata.engine_adapter.paged import engine_loop
from kvstrata.engine_adapter.paged.config import EngineConfig, StepConfig
from kvstrata.engine_adapter.paged.engine import Connect, Engine
from kvstrata.engine_adapter.paged.engine_loop import EngineLoop
from kvstrata.engine_adapter.paged.outputs import ModelRunnerOutput, RequestOutput, SchedulerOutput
from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.engine_adapter.paged.text.tokenizer import ByteTokenizer
from kvstrata.proto.errors import Busy, Closed, InvalidArgument, Unavailable
from tests.engine_adapter.paged.simulated import Pool, ScriptedConnector, SimulatedRanks, expected, kv_config
from tests.waiting import until

PATIENCE_S = 30.0
STEP = StepConfig(max_num_batched_tokens=16, max_num_seqs=4, max_waiting=3)
LONG = SamplingParams(max_tokens=30, ignore_eos=True)


class GatedRanks(SimulatedRanks):
    """Ranks that stop before a step while ``gate`` is closed, and break when told to."""

    def __init__(self) -> None:
        super().__init__(kv_config(40), STEP, lambda _: "", Pool())
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.broken = ""

    def execute(self, output: SchedulerOutput) -> list[ModelRunnerOutput]:
        self.reached.set()
        assert self.gate.wait(PATIENCE_S)
        if self.broken:
            raise Unavailable(self.broken)
        return super().execute(output)

    def stop(self) -> None:
        """The next step stops before it computes."""
        self.gate.clear()
        self.reached.clear()


@dataclass
class Caller:
    """Collects what a request's callback gets."""

    outputs: queue.SimpleQueue[RequestOutput] = field(default_factory=queue.SimpleQueue)

    def __call__(self, output: RequestOutput) -> None:
        assert threading.current_thread().name == "kvstrata-engine"
        self.outputs.put(output)

    def end(self) -> tuple[list[int], RequestOutput]:
        """All tokens, and the last output; nothing comes after it."""
        tokens: list[int] = []
        while True:
            output = self.outputs.get(timeout=PATIENCE_S)
            tokens += output.new_token_ids
            if output.finish_reason is not None:
                assert self.outputs.empty()
                return tokens, output


class Rig:
    def __init__(self, connect: Connect | None = None) -> None:
        self.ranks = GatedRanks()
        self.now = 0.0
        self.engine = Engine(EngineConfig(step=STEP), self.ranks, ByteTokenizer(), connect)
        self.loop = EngineLoop(self.engine, clock=lambda: self.now)

    def submit(self, length: int, sampling: SamplingParams = LONG, request_id: str | None = None) -> tuple[str, Caller]:
        caller = Caller()
        return self.loop.submit(text(length), sampling, request_id=request_id, on_output=caller), caller


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.ranks.gate.set()
    made.loop.close()
    assert not made.loop._thread.is_alive() and made.ranks.closed


def text(length: int) -> list[int]:
    return list(range(length))


def at_once(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_requests_from_many_threads_get_their_own_tokens(rig: Rig) -> None:
    ends: dict[int, list[int]] = {}

    def ask(length: int) -> None:
        while True:
            try:
                ends[length] = rig.submit(length, SamplingParams(max_tokens=4, ignore_eos=True))[1].end()[0]
            except Busy:
                continue
            return

    threads = [at_once(lambda length=length: ask(length)) for length in range(1, 4)]  # type: ignore[misc]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert ends == {n: expected(text(n), SamplingParams(max_tokens=4, ignore_eos=True), 40)[0] for n in range(1, 4)}
    stats = rig.loop.stats()
    assert stats.finished == {"length": 3} and stats.running == 0, "what an output reported is in the stats"


def test_ids_are_unique_unless_given(rig: Rig) -> None:
    first, second = rig.submit(3), rig.submit(3)
    assert first[0] != second[0]
    named, caller = rig.submit(3, request_id="mine")
    assert named == "mine" and caller.end()[1].request_id == "mine"


def test_what_no_engine_could_serve_is_refused_to_the_caller(rig: Rig) -> None:
    with pytest.raises(InvalidArgument, match="no tokens"):
        rig.submit(0)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        rig.submit(3, SamplingParams(max_tokens=0))


def test_what_only_the_engine_can_tell_is_an_output(rig: Rig) -> None:
    rig.ranks.stop()
    _, first = rig.submit(3, request_id="a")
    assert rig.ranks.reached.wait(PATIENCE_S)
    _, same = rig.submit(3, request_id="a")
    _, long = rig.submit(40)
    others = [rig.submit(1)[1] for _ in range(4)]
    rig.ranks.gate.set()
    assert "in use" in same.end()[1].error
    assert "at most 39" in long.end()[1].error
    assert "max_waiting" in others[3].end()[1].error
    assert first.end()[1].finish_reason == "length"
    assert all(caller.end()[1].finish_reason == "length" for caller in others[:3])


def test_an_abort_is_the_last_output(rig: Rig) -> None:
    rig.ranks.stop()
    request_id, caller = rig.submit(3)
    assert rig.ranks.reached.wait(PATIENCE_S)
    rig.loop.abort(request_id)
    rig.loop.abort("unknown")
    rig.ranks.gate.set()
    tokens, last = caller.end()
    assert last.finish_reason == "abort" and len(tokens) <= 2


def test_an_id_is_in_use_until_its_end_was_told(rig: Rig) -> None:
    rig.ranks.stop()
    _, first = rig.submit(3, request_id="a")
    assert rig.ranks.reached.wait(PATIENCE_S)
    rig.loop.abort("a")
    _, second = rig.submit(3, request_id="a")
    rig.ranks.gate.set()
    assert first.end()[1].finish_reason == "abort"
    assert "in use" in second.end()[1].error
    assert rig.submit(3, request_id="a")[1].end()[1].finish_reason == "length"


def test_the_inbox_has_a_bound_but_not_for_aborts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "INBOX_MAX", 2)
    rig.ranks.stop()
    request_id, caller = rig.submit(3)
    assert rig.ranks.reached.wait(PATIENCE_S)
    rig.submit(1)
    rig.submit(1)
    with pytest.raises(Busy, match="2 orders"):
        rig.submit(1)
    rig.loop.abort(request_id)
    rig.ranks.gate.set()
    assert caller.end()[1].finish_reason == "abort"


def test_a_callback_that_raises_loses_its_request_only(rig: Rig) -> None:
    raised = threading.Event()

    def broken(_: RequestOutput) -> None:
        raised.set()
        raise ValueError("a caller's mistake")

    rig.loop.submit(text(3), LONG, on_output=broken)
    assert raised.wait(PATIENCE_S)
    _, caller = rig.submit(5)
    assert caller.end()[0] == expected(text(5), LONG, 40)[0]
    assert rig.loop.stats().finished == {"abort": 1, "length": 1} and rig.loop.health()["healthy"]


def test_an_exception_in_the_engine_ends_every_request_and_shows_in_health(rig: Rig) -> None:
    rig.ranks.stop()
    rig.ranks.broken = "rank 1 is gone"
    _, running = rig.submit(3)
    assert rig.ranks.reached.wait(PATIENCE_S)
    _, queued = rig.submit(3)
    rig.ranks.gate.set()
    for caller in (running, queued):
        last = caller.end()[1]
        assert last.finish_reason == "error" and "rank 1 is gone" in last.error
    rig.loop._thread.join(PATIENCE_S)
    health = rig.loop.health()
    assert not health["healthy"] and "rank 1 is gone" in str(health["problem"])
    with pytest.raises(Unavailable, match="rank 1 is gone"):
        rig.submit(3)
    with pytest.raises(Unavailable, match="rank 1 is gone"):
        rig.loop.reset_prefix_cache()
    rig.loop.abort("anything")


def test_a_step_that_does_not_end_shows_in_health(rig: Rig) -> None:
    rig.ranks.stop()
    rig.submit(3)
    assert rig.ranks.reached.wait(PATIENCE_S)
    assert rig.loop.health()["healthy"]
    rig.now += engine_loop.STUCK_S + 1
    health = rig.loop.health()
    assert not health["healthy"] and "121 s" in str(health["problem"]) and health["age_s"] == 121.0


def test_the_prefix_cache_is_reset_between_steps(rig: Rig) -> None:
    rig.submit(9)[1].end()
    assert rig.loop.reset_prefix_cache()
    _, caller = rig.submit(9)
    assert caller.end()[1].num_local_cached_tokens == 0
    _, caller = rig.submit(9)
    assert caller.end()[1].num_local_cached_tokens == 8


def test_close_lets_requests_end_within_its_deadline(rig: Rig) -> None:
    rig.ranks.stop()
    _, caller = rig.submit(3)
    assert rig.ranks.reached.wait(PATIENCE_S)
    closing = at_once(lambda: rig.loop.close(1.0))  # the clock stands still: the deadline never comes
    while rig.loop._state == "open":
        pass
    with pytest.raises(Closed):
        rig.submit(3)
    rig.ranks.gate.set()
    closing.join(PATIENCE_S)
    assert caller.end()[1].finish_reason == "length" and not closing.is_alive()
    assert rig.loop.health() | {"age_s": 0} == {
        "healthy": False,
        "problem": "closed",
        "problems": [],
        "age_s": 0,
        "running": 0,
        "waiting": 0,
        "loading": 0,
    }


def test_close_aborts_what_is_left_at_its_deadline(rig: Rig) -> None:
    rig.ranks.stop()
    callers = [rig.submit(3)[1]]
    assert rig.ranks.reached.wait(PATIENCE_S)
    callers.append(rig.submit(3)[1])
    closing = at_once(lambda: rig.loop.close(0.0))
    while rig.loop._state == "open":
        pass
    rig.ranks.gate.set()
    closing.join(PATIENCE_S)
    assert [caller.end()[1].finish_reason for caller in callers] == ["abort", "abort"]
    rig.loop.close()


def test_an_idle_engine_hears_of_its_connectors_threads() -> None:
    """A thread that dies while nobody asks anything shows in health all the same."""
    rig = Rig(lambda holder: ScriptedConnector(holder, Pool()))
    try:
        connector = rig.engine.connector
        assert isinstance(connector, ScriptedConnector) and rig.loop.health()["problems"] == []
        connector.ailing = ["rank 0: connector-load-1 has died"]
        rig.now += 5.0
        until(lambda: rig.loop.health()["problems"] == connector.ailing)
        assert rig.loop.health()["healthy"], "it serves without the pool"
    finally:
        rig.ranks.gate.set()
        rig.loop.close()

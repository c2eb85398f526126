"""Any schedule of arrivals, steps, transfers, late answers and aborts: every request ends, with its own tokens.

The caches are so small that requests take each other's blocks, and transfers keep some of them for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.engine_adapter.connector.base import Job
from kvstrata.engine_adapter.paged.config import StepConfig
from kvstrata.proto.errors import Busy, InvalidArgument
from tests.engine_adapter.paged.simulated import BLOCK, FULL, SLIDING, Life, World, expected, kv_config

MAX_MODEL_LEN = 28
#: Prompts are these, cut: many share a beginning, some differ early.
TEXTS = tuple(
    [*range(fork), *range(100 + fork, 100 + fork + 40 - fork)] for fork in (0, BLOCK, 3 * BLOCK, 4 * BLOCK + 1)
)
IDS = ("a", "b", "c", "d", "e", "f")

texts = st.sampled_from(TEXTS)
salts = st.sampled_from(["", "", "x"])
lengths = st.integers(1, MAX_MODEL_LEN + 3) | st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1])
arrivals = st.tuples(
    st.sampled_from(IDS), texts, lengths, st.sampled_from([1, 3, 12, 24]), salts, st.sampled_from([True, True, False])
)


class ScheduleMachine(RuleBasedStateMachine):
    specs = (FULL,)
    #: A lone longest request needs 7 blocks, and there is the null block. At most one and a half of them fit.
    num_blocks = (8, 11)
    real_side = False

    @initialize(
        blocks=st.integers(0, 1),
        budget=st.sampled_from([5, 16]),
        seats=st.integers(1, 4),
        caching=st.booleans(),
        stored=st.integers(0, len(TEXTS)),
        store=st.booleans(),
        layered=st.booleans(),
    )
    def start(
        self, blocks: int, budget: int, seats: int, caching: bool, stored: int, store: bool, layered: bool
    ) -> None:
        self.world = World(
            kv_config(self.num_blocks[blocks], *self.specs, max_model_len=MAX_MODEL_LEN, budget=budget),
            step=StepConfig(max_num_batched_tokens=budget, max_num_seqs=seats, max_waiting=5),
            enable_prefix_caching=caching,
            store=store,
            real_side=self.real_side,
            layered=layered,
        )
        self.layered_ends: list[str] = []
        self.early: set[int] = set()  # layered loads that are read before they have come
        self.world.ranks.end_layered = self._end_layered
        self.world.ranks.misses_layer = lambda job: job.job_id in self.early
        self.live: list[Life] = []
        self.ended: list[str] = []
        self.late: dict[str, int] = {}  # steps until its lookup is answered
        for text in TEXTS[:stored]:
            self.world.pool.put(text)

    @rule(arrivals=st.lists(arrivals, min_size=1, max_size=4))
    def arrive(self, arrivals: list[tuple[str, list[int], int, int, str, bool]]) -> None:
        for request_id, text, length, max_tokens, salt, ignore_eos in arrivals:
            try:
                self.world.add(request_id, text[:length], max_tokens=max_tokens, salt=salt, ignore_eos=ignore_eos)
            except (Busy, InvalidArgument):  # the queue is full, the id in use
                continue
            self.live.append(self.world[request_id])

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count if self.world.scheduler.has_unfinished else 1):
            self._step()

    @rule(victim=st.sampled_from(IDS), computing=st.booleans())
    def abort(self, victim: str, computing: bool) -> None:
        """At rest, or while the ranks compute."""
        if computing:
            self._step(between=lambda: self.world.scheduler.abort(victim))
        else:
            self.world.scheduler.abort(victim)

    @precondition(lambda self: self.world.ranks.jobs)
    @rule(data=st.data())
    def end_job(self, data: st.DataObject) -> None:
        """All of it, its beginning, or any rows came through."""
        job_id = data.draw(st.sampled_from(sorted(self.world.ranks.jobs)))
        count = self.world.ranks.num_rows(job_id)
        beginnings = st.integers(0, count).map(lambda good: [True] * good + [False] * (count - good))
        done = data.draw(beginnings | st.lists(st.booleans(), min_size=count, max_size=count))
        self.world.ranks.end_job(job_id, done)

    @precondition(lambda self: self.world.ranks.jobs)
    @rule()
    def end_jobs(self) -> None:
        self.world.end_jobs()

    @rule(ends=st.lists(st.sampled_from(["whole", "none", "head", "late", "early"]), max_size=4))
    def layered_loads_end(self, ends: list[str]) -> None:
        """How the next ones end beside their steps."""
        self.layered_ends = ends

    def _end_layered(self, job: Job) -> list[bool] | None:
        count = self.world.ranks.num_rows(job.job_id)
        how = self.layered_ends.pop() if self.layered_ends else "whole"
        if how == "early":
            self.early.add(job.job_id)
        good = {"whole": count, "early": count, "none": 0, "head": count // 2}.get(how)
        return None if good is None else [row < good for row in range(count)]

    @rule(request_id=st.sampled_from(IDS), steps=st.integers(1, 8))
    def lookup_is_late(self, request_id: str, steps: int) -> None:
        self.late[request_id] = steps

    @rule(text=texts, length=lengths, salt=salts)
    def another_engine_stores(self, text: list[int], length: int, salt: str) -> None:
        self.world.pool.put(text[:length], salt)

    @invariant()
    def structure(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world, connector = self.world, self.world.connector
        assert connector is not None
        self.late.clear()
        for _ in range(400):
            if not world.scheduler.has_unfinished and not connector.jobs_pending():
                break
            self._step()
            world.end_jobs()
        assert not self.live, [world.scheduler.story(life.request.request_id) for life in self.live]
        self._step()
        world.check_empty()
        ends = [end.job_id for end in connector.ends]
        assert len(ends) == len(set(ends)) and set(ends) <= connector.accepted
        stats = world.scheduler.stats()
        assert stats.finished == Counter(self.ended)
        assert stats.prompt_tokens == sum(stats.prompt_tokens_by_source.values())
        assert stats.external_prefix_cache_hits <= stats.external_prefix_cache_queries

    def _step(self, between: Callable[[], None] | None = None) -> None:
        assert self.world.connector is not None
        self.world.connector.be_late(self.late)
        self.late = {request_id: steps - 1 for request_id, steps in self.late.items() if steps > 1}
        self.world.step(between)
        self._collect()

    def _collect(self) -> None:
        """Requests that ended in the last step, held against what they should have been."""
        for life in [life for life in self.live if life.reason]:
            self.live.remove(life)
            self.ended.append(life.reason)
            prompt, request = life.prompt, life.request
            if life.reason == "error":
                assert len(prompt) >= MAX_MODEL_LEN and not life.tokens
                continue
            tokens, reason = expected(prompt, request.sampling, MAX_MODEL_LEN, request.cache_salt)
            if life.reason == "abort":
                assert life.tokens == tokens[: len(life.tokens)]
            else:
                assert (life.tokens, life.reason) == (tokens, reason)


class HybridMachine(ScheduleMachine):
    """Two groups: full attention, and a window whose blocks are given back as it moves on."""

    specs = (FULL, SLIDING)
    num_blocks = (15, 19)


class PoolSideMachine(ScheduleMachine):
    """With the scheduler side that a pool has."""

    real_side = True


class HybridPoolSideMachine(HybridMachine):
    """Loads of a window bring the blocks before its end only."""

    real_side = True


SETTINGS = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestSchedules = ScheduleMachine.TestCase
TestHybridSchedules = HybridMachine.TestCase
TestPoolSideSchedules = PoolSideMachine.TestCase
TestHybridPoolSideSchedules = HybridPoolSideMachine.TestCase
TestSchedules.settings = SETTINGS
TestHybridSchedules.settings = SETTINGS
TestPoolSideSchedules.settings = SETTINGS
TestHybridPoolSideSchedules.settings = SETTINGS

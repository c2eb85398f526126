"""The scheduler side under random schedules: every load ends once, every hold is released, every bound holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.engine_adapter.connector.base import (
    Computed,
    ConnectorMeta,
    ConnectorOutput,
    Job,
    JobKind,
    JobOutcome,
    LoadEnd,
    PoolState,
)
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.hits import LoadRows
from kvstrata.engine_adapter.connector.lookups import LookupReason
from kvstrata.engine_adapter.connector.scheduler_side import PoolSchedulerSide
from tests.engine_adapter.connector.scheduler_fakes import (
    Clock,
    CountingHolder,
    FakeLookups,
    FakeRequest,
    full_layout,
    window_layout,
)

NAMES = ("a", "b", "c")
NUM_BLOCKS = 100_000


@dataclass
class Life:
    """One life of a request, as the engine sees it. ``state``: waiting, loading, running."""

    request: FakeRequest
    state: str = "waiting"
    computed: int = 0
    tables: tuple[list[int], ...] = ()
    job_id: int | None = None

    def read_tables(self) -> tuple[list[int], ...]:
        return self.tables


@dataclass
class Sent:
    """A job that the ranks know. ``reports``: what each has said so far."""

    job: Job
    reports: dict[int, bytes] = field(default_factory=dict)

    @property
    def blocks(self) -> list[int]:
        return [block for group in self.job.groups for block in group.block_ids]


class Machine(RuleBasedStateMachine):
    @initialize(
        ranks=st.integers(1, 2),
        windowed=st.booleans(),
        policy=st.sampled_from(["auto", "auto", "always", "never"]),
        pending=st.sampled_from([0, 3, 1000]),
        decode=st.booleans(),
    )
    def start(self, ranks: int, windowed: bool, policy: str, pending: int, decode: bool) -> None:
        self.layout = (window_layout if windowed else full_layout)(ranks, NUM_BLOCKS)
        self.clock, self.holder, self.lookups = Clock(), CountingHolder(), FakeLookups()
        config = PoolConfig(load_policy=policy, store_pending_blocks_max=pending, store_decode=decode)  # type: ignore[arg-type]
        self.side = PoolSchedulerSide(self.layout, config, self.lookups, self.holder, clock=self.clock)
        self.lives: dict[str, Life] = {}
        self.accepted: dict[int, tuple[Life, int, int]] = {}  # load job -> life, local, asked
        self.sent: dict[int, Sent] = {}
        self.finished: list[Job] = []
        self.cancelled: set[int] = set()
        self.unsent: set[int] = set()
        self.ended: dict[int, LoadEnd] = {}
        self.next_block = 1
        self.pool = PoolState.READY

    # -- requests

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(1, 60), content=st.sampled_from("xy"))
    def arrive(self, name: str, tokens: int, content: str) -> None:
        if name in self.lives:
            return
        self.lives[name] = Life(FakeRequest(name, tokens, content=content))
        self.side.on_new_request(self.lives[name].request)

    @precondition(lambda self: self.lookups.open)
    @rule(data=st.data(), have=st.sampled_from(["all", "all", "some", "none"]), reason=st.sampled_from(LookupReason))
    def answer(self, data: st.DataObject, have: str, reason: LookupReason) -> None:
        lookup_id = data.draw(st.sampled_from(sorted(self.lookups.open)))
        asked = self.lookups.open[lookup_id]
        every = [packed[at : at + 16] for packed in asked.hashes for at in range(0, len(packed), 16)]
        kept = {"all": every, "some": every[: len(every) // 2], "none": []}[have]
        if data.draw(st.booleans()):
            reason = LookupReason.ANSWERED
        self.lookups.answer(set(kept), reason, lookup_id)

    @rule(name=st.sampled_from(NAMES), local_units=st.integers(0, 3), accept=st.booleans())
    def match(self, name: str, local_units: int, accept: bool) -> None:
        life = self.lives.get(name)
        if life is None or life.state != "waiting":
            return
        aligned, request = self.layout.aligned_tokens, life.request
        local = min(local_units * aligned, (request.num_tokens - 1) // aligned * aligned)
        found = self.side.get_num_new_matched_tokens(request, local)
        assert found == self.side.get_num_new_matched_tokens(request, local)
        if found is None:
            assert self.lookups.open
            return
        assert 0 <= found <= request.num_tokens - 1 - local and found % aligned == 0
        if accept:
            self._allocate(life, local, found)

    def _allocate(self, life: Life, local: int, external: int) -> None:
        load = LoadRows(self.layout, local, local + external)
        life.tables = tuple(
            [
                self._fresh()
                if not kind.window_tokens or index in load.rows(group) or index * kind.block_tokens < local
                else (0 if index * kind.block_tokens < local + external else self._fresh())
                for index in range(-(-life.request.num_tokens // kind.block_tokens) + 20)
            ]
            for group, kind in enumerate(self.layout.groups)
        )
        job_id = self.side.update_state_after_alloc(life.request, life.tables, external)
        assert (job_id is None) == (external == 0)
        life.computed, life.state = local, "running"
        if job_id is not None:
            assert job_id not in self.accepted
            self.accepted[job_id] = (life, local, external)
            self.unsent.add(job_id)
            life.state, life.job_id = "loading", job_id

    def _fresh(self) -> int:
        self.next_block += 1
        return self.next_block

    @rule(name=st.sampled_from(NAMES), again=st.booleans())
    def stop(self, name: str, again: bool) -> None:
        """Finished, aborted or, with ``again``, preempted: its id comes back at once."""
        life = self.lives.pop(name, None)
        if life is None:
            return
        self.side.request_stopped(life.request)
        if life.job_id in self.unsent:
            self.unsent.remove(life.job_id)
            self.cancelled.add(life.job_id)
        if again:
            self.lives[name] = Life(life.request)
            self.side.on_new_request(life.request)

    # -- steps

    @rule(names=st.sets(st.sampled_from(NAMES)), chunk=st.integers(1, 30))
    def step(self, names: set[str], chunk: int) -> None:
        computed = []
        for life in (self.lives[name] for name in sorted(names) if name in self.lives):
            if life.state == "running":
                if life.computed == life.request.num_tokens and life.request.num_tokens < 70:
                    life.request.grow(1)
                life.computed = min(life.computed + chunk, life.request.num_tokens)
                computed.append(Computed(life.request, life.read_tables, life.computed))
        self._sent(self.side.build_meta(computed), {request.request_id: tokens for request, _, tokens in computed})

    def _sent(self, meta: ConnectorMeta | None, computed: dict[str, int]) -> None:
        meta = meta or ConnectorMeta()
        assert {job.job_id for job in meta.loads} == self.unsent
        self.unsent = set()
        for job in (*meta.loads, *meta.stores):
            assert job.job_id not in self.sent and job.groups is not None
            self.sent[job.job_id] = Sent(job)
            for blocks in job.groups:
                assert 0 not in blocks.block_ids and len(blocks.hashes) == 16 * len(blocks.block_ids)
        for job in meta.stores:
            assert self.pool is PoolState.READY
            for blocks in job.groups:
                end = (blocks.first_index + len(blocks.block_ids)) * self.layout.groups[blocks.group].block_tokens
                assert end <= computed[job.request_id], "stored before it is computed"
                table = self.lives[job.request_id].tables[blocks.group]
                assert table[blocks.first_index : blocks.first_index + len(blocks.block_ids)] == blocks.block_ids

    @rule(data=st.data(), pool=st.sampled_from([PoolState.READY, PoolState.READY, PoolState.ABSENT]))
    def report(self, data: st.DataObject, pool: PoolState) -> None:
        """Some ranks report some jobs, among nonsense."""
        outputs: list[list[JobOutcome]] = [[] for _ in range(self.layout.shard_count)]
        for sent in list(self.sent.values()):
            for rank, outcomes in enumerate(outputs):
                if rank not in sent.reports and data.draw(st.booleans()):
                    outcomes.append(self._outcome(data, sent, rank))
        if data.draw(st.booleans()):
            outputs[0].append(JobOutcome(job_id=10_000, kind=JobKind.LOAD, done=b"\1"))
        if self.finished and data.draw(st.booleans()):
            outputs[-1].append(JobOutcome(job_id=self.finished[-1].job_id, kind=JobKind.STORE, done=b""))
        self._update(outputs, pool)

    def _outcome(self, data: st.DataObject, sent: Sent, rank: int) -> JobOutcome:
        count = len(sent.blocks)
        how = data.draw(st.sampled_from(["all", "all", "none", "some"]))
        done = {
            "all": b"\1" * count,
            "none": b"\0" * count,
            "some": bytes(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))),
        }[how]
        sent.reports[rank] = done
        seconds = data.draw(st.sampled_from([0.0, 0.01, 3.0]))
        return JobOutcome(
            job_id=sent.job.job_id, kind=sent.job.kind, done=done, bytes_moved=64 * count, seconds=seconds
        )

    def _update(self, outputs: list[list[JobOutcome]], pool: PoolState) -> None:
        self.pool = pool
        ends = self.side.update_output([ConnectorOutput(outcomes=outcomes, pool=pool) for outcomes in outputs])
        terminal = [sent for sent in self.sent.values() if len(sent.reports) == self.layout.shard_count]
        for sent in terminal:
            self.finished.append(self.sent.pop(sent.job.job_id).job)
        wanted = {
            sent.job.job_id
            for sent in terminal
            if sent.job.kind is JobKind.LOAD
            and self.lives.get(sent.job.request_id) is self.accepted[sent.job.job_id][0]
        }
        assert sorted(end.job_id for end in ends) == sorted(wanted)
        for end in ends:
            assert end.job_id not in self.ended, "a load ended twice"
            self.ended[end.job_id] = end
            life, local, asked = self.accepted[end.job_id]
            assert end.asked_tokens == asked and 0 <= end.loaded_tokens <= asked
            assert end.loaded_tokens % self.layout.aligned_tokens == 0
            reports = next(sent.reports for sent in terminal if sent.job.job_id == end.job_id)
            together = bytes(min(column) for column in zip(*reports.values(), strict=True))
            assert end.loaded_tokens == LoadRows(self.layout, local, local + asked).loaded_tokens(together)
            life.state, life.computed, life.job_id = "running", local + end.loaded_tokens, None
            for table in life.tables:  # the engine allocates anew what a shorter load needs
                table[:] = [block or self._fresh() for block in table]

    @rule(tokens=st.integers(0, 5000), seconds=st.sampled_from([0.0, 0.001, 1.0]), later=st.floats(0, 20))
    def time_passes(self, tokens: int, seconds: float, later: float) -> None:
        self.side.forward_done(tokens, seconds)
        self.clock.now += later

    # -- what always holds

    @invariant()
    def blocks_are_held_exactly_while_a_job_may_touch_them(self) -> None:
        expected: dict[int, int] = {}
        for sent in self.sent.values():
            for block in sent.blocks:
                expected[block] = expected.get(block, 0) + 1
        for job_id in self.unsent:
            life, local, asked = self.accepted[job_id]
            for group, table in enumerate(life.tables):
                for row in LoadRows(self.layout, local, local + asked).rows(group):
                    expected[table[row]] = expected.get(table[row], 0) + 1
        assert self.holder.held() == expected
        assert self.side.jobs_pending() == len(self.sent) + len(self.unsent)
        self.side.check()

    def teardown(self) -> None:
        if not hasattr(self, "side"):
            return
        self._sent(self.side.build_meta([]), {})
        outputs: list[list[JobOutcome]] = [[] for _ in range(self.layout.shard_count)]
        for sent in self.sent.values():
            for rank, outcomes in enumerate(outputs):
                if rank not in sent.reports:
                    sent.reports[rank] = b"\1" * len(sent.blocks)
                    outcomes.append(JobOutcome(job_id=sent.job.job_id, kind=sent.job.kind, done=sent.reports[rank]))
        self._update(outputs, PoolState.READY)
        assert self.holder.held() == {} and self.side.jobs_pending() == 0
        for life in self.lives.values():
            assert life.job_id is None, "a load that never ended"
        for life in self.lives.values():
            self.side.request_stopped(life.request)
        self.side.check()
        assert self.side._requests == {}
        self.side.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)

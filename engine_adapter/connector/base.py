"""The seam between a paged engine and the pool: types and two protocols, no behaviour.

One object of each protocol: the *scheduler side* lives with the scheduler and moves no bytes, the *worker side*
lives with each rank's KV memory and moves all of them. They speak through ``ConnectorMeta`` (down, once a step)
and ``ConnectorOutput`` (up), and name what they do by **job id**: a request that is preempted or aborted may come
back under its old id while its old jobs still run.

::

    scheduler side                                            worker side (each rank)
    --------------                                            -----------------------
    get_num_new_matched_tokens  -> None "not yet" | n         lookup server (ZMQ IPC)
    update_state_after_alloc    -> a load job
    build_meta                  -> ConnectorMeta ---------->  start(meta): threads load and store
    update_output               <- ConnectorOutput <--------  take_output(): jobs that became terminal
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import msgspec

BlockIds = tuple[list[int], ...]  #: one list a KV cache group


class JobKind(IntEnum):
    LOAD = 0
    STORE = 1


class GroupBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one KV cache group in a job: row i of all three belongs together.

    ``hashes`` packed; ``block_ids`` in the engine's KV tensors; ``first_index`` of the first block in the
    request's chain (in the group's own block size); ``parent`` the hash before it (empty at index 0).
    """

    group: int
    hashes: bytes
    block_ids: list[int]
    first_index: int = 0
    parent: bytes = b""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A load or a store of one request. Ends exactly once, by ``deadline_s`` seconds after it began: a load when it
    is given to the worker side, a store when the forward pass that writes its blocks has ended.

    The engine's blocks it names stay referenced (by the scheduler side) until it is terminal on every rank.

    ``layered``: a load that runs beside the forward pass of the step that carries it, which waits for it layer by
    layer (:meth:`WorkerSide.wait_layer`) and then for its end, so long as it may.

    ``trace``: the request's (:attr:`ConnectorRequest.trace`); spans of the job's calls come under it.
    """

    job_id: int
    kind: JobKind
    request_id: str
    cache_salt: str
    groups: list[GroupBlocks]
    deadline_s: float
    layered: bool = False
    trace: str = ""


class ConnectorMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Down, once a step. Stores are started after the step's forward pass, loads before it.

    ``reset``: before the jobs, open the pool's namespaces anew, as the engine's weights are new; jobs given earlier
    are of the older ones and end as not done."""

    loads: list[Job] = []
    stores: list[Job] = []
    reset: bool = False


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's end of one job. ``done``: one byte a block, group after group: 1 loaded (or stored), 0 not.

    ``layered``: of a store, it was made beside the forward pass.

    ``terminal`` memory only: a worker reports a job when no transfer of it can touch the engine's memory again.
    """

    job_id: int
    kind: JobKind
    done: bytes
    bytes_moved: int = 0
    seconds: float = 0.0
    reasons: dict[str, int] = {}  #: status name -> blocks, as in LoadResult and StoreResult
    layered: bool = False


class PoolState(IntEnum):
    """How the worker side finds the pool."""

    ABSENT = 0  #: no master answers, or the last calls failed: serve as if there were none
    READY = 1


class ConnectorOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Up, once a step. Every job that ``start`` was given is in exactly one output of every rank."""

    outcomes: list[JobOutcome] = []
    pool: PoolState = PoolState.READY
    problems: list[str] = []  #: of the worker side itself: threads that died, raise or stand still
    superseded: bool = False  #: the pool refuses stores: it says that this engine's weights are of the past
    waited_s: float = 0.0  #: how long the step's forward pass stood still for layered loads
    layers_missed: bool = False  #: a layer of a layered load was not in place when it was read, however the load ended


class ConnectorRequest(Protocol):
    """What the scheduler side reads of an engine's request; never kept beyond the call but by its id."""

    @property
    def request_id(self) -> str: ...
    @property
    def cache_salt(self) -> str: ...
    @property
    def trace(self) -> str:
        """W3C traceparent that it came with; "" without one."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...


class Computed(NamedTuple):
    """A request of a step. ``tables()``: its whole block tables, made when asked for: most steps of most requests
    fill no block. ``tokens``: how many are computed when the step has ended."""

    request: ConnectorRequest
    tables: Callable[[], BlockIds]
    tokens: int


class BlockHolder(Protocol):
    """The engine's block pool, as far as the scheduler side needs it: references on block ids."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """One more reference on each: not evicted, not handed out, until released."""
        ...

    def release(self, block_ids: Sequence[int]) -> None: ...


class LoadEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A load became terminal on every rank. ``loaded_tokens``: whole blocks that every rank and group has,
    counted from the first external token; the rest is the engine's to compute. 0 after a failure."""

    job_id: int
    request_id: str
    asked_tokens: int
    loaded_tokens: int


class SchedulerSide(Protocol):
    """The scheduler's half. Sans-IO but for the lookup socket it is given; called from one thread."""

    def on_new_request(self, request: ConnectorRequest) -> None:
        """It has been queued: a lookup may start now, so that its answer is there when it is scheduled."""
        ...

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int | None:
        """External tokens that a load would bring after the first ``num_computed_tokens``, which are local.

        Idempotent, commits nothing, any number of calls. None: not known yet, ask in a later step (bounded:
        after the lookup deadline the answer is 0). Otherwise whole aligned blocks, and
        ``0 <= n <= num_tokens - 1 - num_computed_tokens``. May be less than the pool holds, where computing is
        faster than loading.
        """
        ...

    def loads_by_layer(self, request: ConnectorRequest, num_external: int, rest_tokens: int) -> bool:
        """Whether the load of those tokens, as just matched, should be layered: ``rest_tokens`` after them would be
        computed in the same step. Commits nothing; never for more than one request a step."""
        ...

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: BlockIds, num_external: int, *, layered: bool = False
    ) -> int | None:
        """Blocks for ``num_external`` tokens are allocated (``block_ids``: the request's whole tables): commit.

        Returns the job id of the load that the next ``build_meta`` carries, None when ``num_external`` is 0.
        The request then waits, as WAITING_FOR_REMOTE_KVS, for its :class:`LoadEnd`.

        ``layered``, as :meth:`loads_by_layer` said: the request is computed in the step that ``build_meta`` is called
        for, and nothing of it is stored in that step. What the step brought for it counts only when a LoadEnd with all
        tokens came with the step's outputs and none of these says ``layers_missed``; otherwise it is as if it had not
        been computed, and waits for the LoadEnd.
        """
        ...

    def build_meta(self, computed: Sequence[Computed]) -> ConnectorMeta | None:
        """Once a step, after scheduling. ``computed``: every scheduled request; its full blocks may be stored.
        None when there is nothing to say."""
        ...

    def update_output(self, outputs: Sequence[ConnectorOutput]) -> list[LoadEnd]:
        """One output a rank. Loads that became terminal; also releases the blocks of terminal stores."""
        ...

    def request_stopped(self, request: ConnectorRequest) -> None:
        """It finished, was aborted or was preempted: its tables are about to be freed. Jobs under way keep their
        own references, and their LoadEnd is not reported any more."""
        ...

    def forward_done(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens in so many seconds: the prefill rate, for load or recompute."""
        ...

    def reset(self) -> None:
        """The engine's weights are new: the ranks open the pool's namespaces anew, at its weight epoch of then.

        Nothing of the older weights goes to the pool, or comes from it, any more: jobs under way end as not done,
        and requests that have computed or loaded anything neither load nor store for the rest of their life. The
        engine forgets its own cached blocks itself."""
        ...

    def jobs_pending(self) -> int:
        """Jobs not yet terminal, and one more for a reset that the ranks were not told of: the engine keeps stepping
        while there are any."""
        ...

    def fileno_or_none(self) -> int | None:
        """A descriptor that becomes readable when a lookup was answered, for an idle engine to wait on."""
        ...

    def problems(self) -> list[str]:
        """What the ranks last said is wrong with their worker sides, for health. An absent pool is none."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the start: queries, hits, loads, failures... names in docs/engine.md."""
        ...

    def check(self) -> None:
        """Assert every structural invariant."""
        ...

    def close(self) -> None: ...


class WorkerSide(Protocol):
    """A rank's half: owns the client, the registered KV memory, and the threads. Never raises into the engine."""

    def start(self, meta: ConnectorMeta) -> None:
        """Queue the meta's loads at once; its stores when :meth:`forward_ended` says the KV is written."""
        ...

    def wait_layer(self, layer: int) -> bool:
        """Before attention reads the layer's pages (``layer`` of the one group that loads by layer): wait for what the
        step's layered loads bring to them.

        False when some of it will not be there, or the step has stood still for as long as it may: what is computed
        then is not kept, and the step's output says so (``layers_missed``) even if the load still ends well.
        """
        ...

    def layer_written(self, layer: int) -> None:
        """The pages of the layer, and of those before it, have what this step writes to them. Need not be called;
        from the thread that computes, which it does not hold up."""
        ...

    def forward_ended(self) -> None:
        """The step's KV is in memory. Returns when its layered loads have ended, or were waited for long enough."""
        ...

    def take_output(self) -> ConnectorOutput:
        """Outcomes since the last call. Cheap; each outcome is returned once."""
        ...

    def set_waker(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, from any thread, when there is an outcome to take."""
        ...

    def close(self) -> None:
        """Bounded: what is still under way ends as not loaded; memory is unregistered before it returns."""
        ...

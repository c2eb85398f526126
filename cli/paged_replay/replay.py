"""One replay of text on real paged engines, from options to result: every case with engines and a pool of its own."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from kvstrata.cli.paged_replay.case import Case, CaseRun
from kvstrata.cli.paged_replay.conversation import generate_conversations
from kvstrata.cli.paged_replay.options import CaseName, PagedOptions
from kvstrata.cli.paged_replay.plan import Plan, build_plan
from kvstrata.cli.paged_replay.result import PagedResult
from kvstrata.cli.paged_replay.text_trace import TextTrace, is_text_trace, read_text_trace
from kvstrata.cli.paged_replay.vocabulary import tokenizer_path
from kvstrata.cli.replay.pool import OwnPool, RunningPool
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.paged.config import CacheConfig, EngineConfig, ModelConfig
from kvstrata.engine_adapter.paged.text.tokenizer import load_tokenizer
from kvstrata.proto.errors import ConfigError

#: The generated conversations, when the options name no trace.
GENERATED_SESSIONS = 6
GENERATED_TURNS = 8

Progress = Callable[[int, int], None]


def run_paged_replay(options: PagedOptions, progress: Progress | None = None) -> PagedResult:
    """Replay text on real engines; ``progress(done, of)`` counts requests over all cases.

    Raises ``TraceError`` or ``ConfigError`` for what is asked, ``Unavailable`` when the pool or an engine cannot
    start. A fault on the way is in the result.
    """
    trace = load_text(options)
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        tokenizer = tokenizer_path(options, trace, Path(folder))
        plan = build_plan(trace, options, load_tokenizer(tokenizer).encode)
        bar = _Bar(len(options.cases) * len(plan.turns), progress)
        runs = [_run_case(case, options, plan, tokenizer, Path(folder), bar) for case in options.cases]
    return PagedResult.of(options, plan, runs)


def load_text(options: PagedOptions) -> TextTrace:
    """The text that the options name: a trace file, or generated conversations."""
    if options.trace is None:
        if options.agent is not None:
            raise ConfigError("--agent chooses sessions of a trace: name one with --trace")
        return generate_conversations(options.sessions or GENERATED_SESSIONS, GENERATED_TURNS, options.seed)
    if not is_text_trace(options.trace):
        raise ConfigError(f"{options.trace} holds block ids, not text: replay it with --engine stand-in")
    return read_text_trace(options.trace).chosen(options.agent, options.sessions)


class _Bar:
    """Counts requests over all cases."""

    def __init__(self, of: int, progress: Progress | None) -> None:
        self._done, self._of, self._progress = 0, of, progress

    def step(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._of)


def _run_case(name: CaseName, options: PagedOptions, plan: Plan, tokenizer: str, folder: Path, bar: _Bar) -> CaseRun:
    if name != "pool":
        return _serve(name, options, plan, tokenizer, folder, bar, "")
    pool = RunningPool(options.masters) if options.masters is not None else _own_pool(options)
    try:
        run = _serve(name, options, plan, tokenizer, folder, bar, pool.masters)
        run.faults.extend(pool.losses())
    finally:
        pool.close()
    return run


def _own_pool(options: PagedOptions) -> OwnPool:
    return OwnPool(options.nodes, options.pool_bytes_all // options.nodes, options.seed)


def _serve(
    name: CaseName, options: PagedOptions, plan: Plan, tokenizer: str, folder: Path, bar: _Bar, masters: str
) -> CaseRun:
    configs = [_config(name, options, plan, tokenizer, masters, number) for number in range(options.engines)]
    # A salt of its own: what an earlier replay left in a running pool must not be hit.
    case = Case(name, plan, configs, f"replay-{uuid.uuid4().hex}", folder / name)
    try:
        return case.run(options.concurrency, bar.step)
    finally:
        case.close()


def _config(
    name: CaseName, options: PagedOptions, plan: Plan, tokenizer: str, masters: str, number: int
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=options.model, seed=options.seed, tokenizer=tokenizer, max_model_len=plan.max_model_len
        ),
        cache=CacheConfig(
            block_size=options.block_tokens,
            memory_bytes=options.kv_bytes,
            enable_prefix_caching=name != "none",
        ),
        pool=PoolConfig(
            masters=masters,
            transport=_transport(options, number),
            load_policy="always" if options.faults else "auto",  # faults are to be seen
        ),
        name=f"replay-{number}",
    )


def _transport(options: PagedOptions, number: int) -> str:
    """Faults are drawn a block: it is lost, or has a wrong byte, or both; ``faults`` is the share of either."""
    if not options.faults:
        return "auto"
    each = 1 - (1 - options.faults) ** 0.5
    return f"auto+faults:lose={each},corrupt={each},seed={options.seed + number}"

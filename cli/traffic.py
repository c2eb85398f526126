"""``kvstrata replay`` and ``kvstrata demo``: recorded agent traffic on real processes, side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvstrata.cli.daemons import Config
from kvstrata.cli.masters import Json
from kvstrata.cli.output import Exit, expected_errors, print_json, print_rich
from kvstrata.cli.sizes import addresses_flag, size_flag
from kvstrata.proto.errors import ConfigError, KVError
from kvstrata.storage.eviction.setting import EvictionOrder

if TYPE_CHECKING:
    from kvstrata.cli.paged_replay import PagedOptions, PagedResult
    from kvstrata.cli.replay import ReplayOptions, ReplayResult

EngineKind = Literal["paged", "stand-in"]

Engines = Annotated[int, typer.Option(help="Engines, a process each.", min=1, max=64)]
Nodes = Annotated[int, typer.Option(help="Storage nodes of the pool it starts.", min=1, max=32)]
Seed = Annotated[int, typer.Option(help="Same seed, same run.", min=0)]
#: A prefill that is felt, in a minute on two cores.
DEMO_MODEL = "8m"
DEMO_KV_BYTES = 30 << 20
_STAND_IN = "Engine stand-ins"
_PAGED = "Paged engines"

#: Options of one kind of engine only, by name.
STAND_IN_ONLY = ("pool_ssd", "eviction", "private_tokens", "bytes_per_token", "scale", "session_start", "tenants")
PAGED_ONLY = (
    "model", "tokenizer", "agent", "concurrency", "output_tokens", "max_prompt_tokens", "kv_memory", "cases", "faults",
)  # fmt: skip


def replay(
    ctx: typer.Context,
    config: Config = None,
    engine: Annotated[str | None, typer.Option(help="paged or stand-in; by default what the trace is for.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace file; a seeded generator when left out.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Keep the first so many sessions.", min=1)] = None,
    engines: Engines = 4,
    nodes: Nodes = 2,
    routing: Annotated[str, typer.Option(help="round-robin or sticky.")] = "round-robin",
    pool_bytes: Annotated[
        int | None, size_flag(help="What the pool holds; 8x (paged: 2x) all the engines' own caches by default.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens in a block; 512, or 16 on paged engines.", min=1)
    ] = None,
    think_cap: Annotated[
        float | None, typer.Option(help="Cap on think time in seconds; 60, or 0 on paged engines.", min=0)
    ] = None,
    seed: Seed = 0,
    master: Annotated[str | None, addresses_flag(help="Use this running pool.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write an HTML report with plots here.")] = None,
    as_json: Json = False,
    pool_ssd: Annotated[
        int, size_flag(help="An SSD tier beside --pool-bytes; none by default.", rich_help_panel=_STAND_IN)
    ] = 0,
    eviction: Annotated[
        EvictionOrder,
        typer.Option(help="In which order a tenant's blocks leave the pool it starts.", rich_help_panel=_STAND_IN),
    ] = EvictionOrder.SEGMENTED,
    private_tokens: Annotated[
        int, typer.Option(help="Tokens that each engine caches itself.", min=0, rich_help_panel=_STAND_IN)
    ] = 500_000,
    bytes_per_token: Annotated[int, typer.Option(help="Payload bytes a token.", min=1, rich_help_panel=_STAND_IN)] = 4,
    scale: Annotated[float, typer.Option(help="Keep this fraction of the sessions.", rich_help_panel=_STAND_IN)] = 1.0,
    session_start: Annotated[
        float,
        typer.Option(help="A session starts each so many seconds on average.", min=0, rich_help_panel=_STAND_IN),
    ] = 30.0,
    tenants: Annotated[
        int, typer.Option(help="Tenants the sessions are spread over.", min=1, rich_help_panel=_STAND_IN)
    ] = 1,
    model: Annotated[
        str, typer.Option(help="A named size with seeded weights, or a model's folder.", rich_help_panel=_PAGED)
    ] = "13m",
    tokenizer: Annotated[
        str, typer.Option(help="bytes, bpe:N (trained on the trace), or a tokenizer.json.", rich_help_panel=_PAGED)
    ] = "bpe:8192",
    agent: Annotated[str | None, typer.Option(help="Only this agent's sessions.", rich_help_panel=_PAGED)] = None,
    concurrency: Annotated[int, typer.Option(help="Sessions active at once.", min=1, rich_help_panel=_PAGED)] = 1,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1, rich_help_panel=_PAGED)] = 16,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="Longer prompts are skipped and counted.", min=1, rich_help_panel=_PAGED)
    ] = 24_576,
    kv_memory: Annotated[int, size_flag(help="Each engine's own KV memory.", rich_help_panel=_PAGED)] = 1 << 30,
    cases: Annotated[
        str, typer.Option(help="Of none, private, pool: with no cache, own caches, the pool.", rich_help_panel=_PAGED)
    ] = "private,pool",
    faults: Annotated[
        float, typer.Option(help="Share of blocks whose load is made to fail.", rich_help_panel=_PAGED)
    ] = 0.0,
) -> None:
    """Replay a trace: block ids through engine stand-ins, or text through real paged engines.

    Exits 1 on a wrong byte or token, a failed request, or when stand-ins are off their simulator.
    """
    common: dict[str, Any] = {
        "trace": trace,
        "sessions": sessions,
        "engines": engines,
        "nodes": nodes,
        "routing": routing,
        "pool_bytes": pool_bytes,
        "seed": seed,
        "masters": master,
    }
    if block_tokens is not None:
        common["block_tokens"] = block_tokens
    if think_cap is not None:
        common["think_cap_s"] = think_cap
    stand_in: dict[str, Any] = {
        "pool_ssd_bytes": pool_ssd,
        "eviction": eviction,
        "private_tokens": private_tokens,
        "bytes_per_token": bytes_per_token,
        "scale": scale,
        "session_start_s": session_start,
        "tenants": tenants,
        "json": as_json,
    }
    paged: dict[str, Any] = {
        "model": model,
        "tokenizer": tokenizer,
        "agent": agent,
        "concurrency": concurrency,
        "output_tokens": output_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "kv_bytes": kv_memory,
        "cases": tuple(part.strip() for part in cases.split(",")),
        "faults": faults,
    }

    def options() -> ReplayOptions | PagedOptions:
        from kvstrata.cli.paged_replay import PagedOptions
        from kvstrata.cli.replay import ReplayOptions

        if _engine_kind(engine, trace) == "paged":
            _refuse(ctx, "paged", STAND_IN_ONLY)
            return PagedOptions(**common, **paged)
        _refuse(ctx, "stand-in", PAGED_ONLY)
        return ReplayOptions(**common, **stand_in)

    _run(options, html, as_json)


def demo(
    sessions: Annotated[int, typer.Option(help="Agent conversations to play.", min=1)] = 4,
    engines: Engines = 2,
    nodes: Nodes = 2,
    seed: Seed = 0,
    html: Annotated[Path, typer.Option("--html", help="Where the report goes.")] = Path("kvstrata-report.html"),
    as_json: Json = False,
) -> None:
    """Play agent conversations through real engines, without and with a pool on this machine, and show what it wins."""

    def options() -> PagedOptions:
        from kvstrata.cli.paged_replay import PagedOptions

        # Conversations take turns, and an engine's own cache holds less than all of them: as where a pool is needed.
        return PagedOptions(
            sessions=sessions,
            engines=engines,
            nodes=nodes,
            concurrency=sessions,
            model=DEMO_MODEL,
            tokenizer="bpe:1024",
            output_tokens=4,
            kv_bytes=DEMO_KV_BYTES,
            pool_bytes=512 << 20,
            seed=seed,
        )

    _run(options, html, as_json)


def _engine_kind(asked: str | None, trace: Path | None) -> EngineKind:
    """What was asked for, or what the trace is for. Raises :class:`ConfigError` when they do not fit."""
    from kvstrata.cli.paged_replay.text_trace import is_text_trace

    if asked not in (None, "paged", "stand-in"):
        raise ConfigError(f"engine is {asked!r}: choose paged or stand-in")
    text = trace is not None and is_text_trace(trace)
    if text and asked == "stand-in":
        raise ConfigError(f"{trace} holds text: engine stand-ins replay block ids; leave --engine out, or say paged")
    if trace is not None and not text and asked == "paged":
        raise ConfigError(f"{trace} holds block ids, no text: leave --engine out, or say stand-in")
    return "paged" if text or asked == "paged" else "stand-in"


def _refuse(ctx: typer.Context, kind: EngineKind, names: tuple[str, ...]) -> None:
    """An option that would be ignored is an error."""
    # By its name: typer's sources are click's own or a copy of them, depending on its version.
    sources = {name: ctx.get_parameter_source(name) for name in names}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    if given:
        other = "stand-in" if kind == "paged" else "paged"
        raise ConfigError(f"--{given[0].replace('_', '-')} is for {other} engines; this replay runs {kind} ones")


def _run(options: Callable[[], ReplayOptions | PagedOptions], html: Path | None, as_json: bool) -> None:
    with expected_errors():
        from kvstrata.cli.paged_replay import PagedOptions, run_paged_replay
        from kvstrata.cli.replay import console_progress, run_replay

        checked = options()
        if html is not None and not html.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {html}: its folder does not exist")
        result: ReplayResult | PagedResult
        with console_progress() as progress:
            if isinstance(checked, PagedOptions):
                result = run_paged_replay(checked, progress)
            else:
                result = run_replay(checked, progress)
        _say(result, html, as_json)
        raise typer.Exit(Exit.OK if result.exit_code == 0 else Exit.FAILED)


def _say(result: ReplayResult | PagedResult, html: Path | None, as_json: bool) -> None:
    if as_json:
        print_json(result.to_json())
    else:
        print_rich(result.table())
    if html is not None:
        try:
            html.write_text(result.html())
        except OSError as error:
            raise KVError(f"the run is done, but its report cannot be written to {html}: {error.strerror}") from error
        print(f"report: {html.absolute()}", file=sys.stderr)

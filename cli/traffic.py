"""``kvstrata replay`` and ``kvstrata demo``: recorded agent traffic on real processes, side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.daemons import Config
from kvstrata.cli.health import Json
from kvstrata.cli.output import Exit, expected_errors, print_json, print_rich
from kvstrata.cli.sizes import addresses_flag, parse_size, size_flag
from kvstrata.proto.errors import ConfigError, KVError

if TYPE_CHECKING:
    from kvstrata.cli.replay import ReplayResult

Engines = Annotated[int, typer.Option(help="Engine stand-ins, a process each.", min=1, max=64)]
Nodes = Annotated[int, typer.Option(help="Storage nodes of the pool it starts.", min=1, max=32)]
Routing = Annotated[str, typer.Option(help="round-robin or sticky.")]
Private = Annotated[int, typer.Option(help="Tokens that each engine caches itself.", min=0)]
Pool = Annotated[
    int | None,
    size_flag(help="Payload the pool holds; 8x all private caches by default."),
]
BlockTokens = Annotated[int, typer.Option(help="Tokens in a block.", min=1)]
PerToken = Annotated[int, typer.Option(help="Payload bytes a token.", min=1)]
Sessions = Annotated[int | None, typer.Option(help="Keep the first so many sessions.", min=1)]
Scale = Annotated[float, typer.Option(help="Keep this fraction of the sessions.")]
Think = Annotated[float, typer.Option(help="Cap on think time, seconds of virtual time.", min=0)]
Start = Annotated[float, typer.Option(help="A session starts each so many seconds on average.", min=0)]
Seed = Annotated[int, typer.Option(help="Same seed, same run.", min=0)]
Tenants = Annotated[int, typer.Option(help="Tenants the sessions are spread over.", min=1)]
Report = Annotated[Path | None, typer.Option("--html", help="Write an HTML report with plots here.")]


def replay(
    config: Config = None,
    trace: Annotated[Path | None, typer.Option(help="A trace file; the seeded generator when left out.")] = None,
    engines: Engines = 4,
    nodes: Nodes = 2,
    routing: Routing = "round-robin",
    private_tokens: Private = 500_000,
    pool_bytes: Pool = None,
    block_tokens: BlockTokens = 512,
    bytes_per_token: PerToken = 4,
    sessions: Sessions = None,
    scale: Scale = 1.0,
    think_cap: Think = 60.0,
    session_start: Start = 30.0,
    seed: Seed = 0,
    tenants: Tenants = 1,
    master: Annotated[str | None, addresses_flag(help="Use this running pool.")] = None,
    html: Report = None,
    as_json: Json = False,
) -> None:
    """Replay a trace through engine stand-ins: no pool, private caches, and the pool, side by side.

    Exits 1 on a wrong byte, a failed request, or when the run is off its simulator.
    """
    _run(
        {
            "trace": trace,
            "engines": engines,
            "nodes": nodes,
            "routing": routing,
            "private_tokens": private_tokens,
            "pool_bytes": pool_bytes,
            "block_tokens": block_tokens,
            "bytes_per_token": bytes_per_token,
            "sessions": sessions,
            "scale": scale,
            "think_cap_s": think_cap,
            "session_start_s": session_start,
            "seed": seed,
            "tenants": tenants,
            "masters": master,
            "json": as_json,
        },
        html,
        as_json,
    )


def demo(
    sessions: Annotated[int, typer.Option(help="Agent sessions to play.", min=1)] = 40,
    engines: Engines = 4,
    nodes: Nodes = 2,
    bytes_per_token: PerToken = 128,
    seed: Seed = 0,
    html: Annotated[Path, typer.Option("--html", help="Where the report goes.")] = Path("kvstrata-report.html"),
    as_json: Json = False,
) -> None:
    """Start a pool on this machine, play agent traffic through it, and show what it wins."""
    options = {
        "sessions": sessions,
        "engines": engines,
        "nodes": nodes,
        "bytes_per_token": bytes_per_token,
        "pool_bytes": parse_size("2GiB"),
        "seed": seed,
        "json": as_json,
    }
    _run(options, html, as_json)


def _run(options: dict[str, Any], html: Path | None, as_json: bool) -> None:
    with expected_errors():
        from kvstrata.cli.replay import ReplayOptions, console_progress, run_replay

        checked = ReplayOptions(**options)
        if html is not None and not html.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {html}: its folder does not exist")
        with console_progress() as progress:
            result = run_replay(checked, progress)
        _say(result, html, as_json)
        raise typer.Exit(Exit.OK if result.exit_code == 0 else Exit.FAILED)


def _say(result: ReplayResult, html: Path | None, as_json: bool) -> None:
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

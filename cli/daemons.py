"""``kvstrata master`` and ``kvstrata storage``: one daemon in the foreground, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstrata.cli.output import expected_errors
from kvstrata.cli.process import LogFormat, LogLevel, configure_logs, ready_printer
from kvstrata.cli.security_options import (
    ClientCerts,
    ClientConnections,
    ClientRequests,
    PlainTokens,
    TicketKeys,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenOfNode,
    Tokens,
)
from kvstrata.cli.settings import load_config
from kvstrata.cli.sizes import address_flag, addresses_flag, format_size, parse_size, size_flag
from kvstrata.cli.state_option import State, StatePasswordFile
from kvstrata.cli.trace_option import Traces, TracesRatio
from kvstrata.proto.errors import ConfigError
from kvstrata.storage.eviction.setting import EvictionOrder
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.rdma.rails import RailMode, RailOptions
from kvstrata.transfer.security.checks import checked
from kvstrata.transfer.security.files import SecurityFiles
from kvstrata.transfer.security.rates import USUAL, bounds_of
from kvstrata.transfer.traces import TraceOptions

DRAM_BYTES_MIN = 8 << 20
_ROUTING = "KV events and routing"

Config = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of options.", callback=load_config, is_eager=True, show_default=False),
]
Format = Annotated[LogFormat, typer.Option("--log-format", help="Log and ready lines for people or for programs.")]
Level = Annotated[LogLevel, typer.Option("--log-level", help="The least severe event to log.")]


def master(
    config: Config = None,
    listen: Annotated[
        str,
        address_flag(help="Channel: lookups, placement. Port 0 picks a free one."),
    ] = "127.0.0.1:7400",
    grpc: Annotated[str, address_flag(help="gRPC: node sync, admin.")] = "127.0.0.1:7401",
    http: Annotated[str, address_flag(help="HTTP: metrics, health.")] = "127.0.0.1:7402",
    state: State = None,
    state_password_file: StatePasswordFile = None,
    advertise: Annotated[
        str | None,
        typer.Option(help="Host by which clients and other masters reach this one, where it binds every address."),
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds after a start in which a miss may be 'not yet'.", min=0)] = 5.0,
    hot_copies: Annotated[
        bool, typer.Option(help="Copy what one busy node is asked for most to a node that is less busy.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of placement, for runs that must repeat.")] = None,
    kv_events: Annotated[
        str,
        typer.Option(
            help="Publish KV events of the pool, as vLLM does of an engine's, here: tcp://HOST:PORT, or a port of "
            "loopback.",
            metavar="ENDPOINT",
            rich_help_panel=_ROUTING,
        ),
    ] = "",
    kv_events_replay: Annotated[
        str, typer.Option(help="Send past events again, here.", metavar="ENDPOINT", rich_help_panel=_ROUTING)
    ] = "",
    kv_events_salts: Annotated[
        bool, typer.Option("--kv-events-salts", help="Name tenants in events, not a hash.", rich_help_panel=_ROUTING)
    ] = False,
    engine_events: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=tcp://HOST:PORT[,replay=tcp://HOST:PORT]: an engine's KV events, for `kvstrata route`; again "
            "for each engine.",
            rich_help_panel=_ROUTING,
        ),
    ] = None,
    traces: Traces = "",
    traces_ratio: TracesRatio = 0.0,
    tokens: Tokens = None,
    ticket_keys: TicketKeys = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    client_certs: ClientCerts = False,
    plain_tokens: PlainTokens = False,
    client_requests: ClientRequests = int(USUAL.requests_s),
    client_connections: ClientConnections = USUAL.connections,
    log_format: Format = LogFormat.text,
    log_level: Level = LogLevel.info,
) -> None:
    """Run a master: it knows which block is where, and who is alive."""
    with expected_errors():
        configure_logs(log_format, log_level)
        from kvstrata.master.daemon import MasterConfig, run
        from kvstrata.master.index.engine_source import parse_engine
        from kvstrata.master.index.services import IndexConfig

        files = SecurityFiles(
            tokens=tokens,
            ticket_keys=ticket_keys,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            client_certs=client_certs,
            plain_tokens=plain_tokens,
        )
        settings = MasterConfig(
            listen=listen,
            grpc=grpc,
            http=http,
            state=state,
            grace_s=grace,
            seed=seed,
            state_password_file=state_password_file,
            advertise=advertise,
            hot_copies=hot_copies,
            index=IndexConfig(
                kv_events=kv_events,
                kv_events_replay=kv_events_replay,
                kv_events_salts=kv_events_salts,
                engines=tuple(parse_engine(each) for each in engine_events or ()),
            ),
            security=checked(files, (grpc, http)),
            bounds=bounds_of(client_requests, client_connections),
            traces=TraceOptions(traces, traces_ratio),
        )
        raise typer.Exit(run(settings, ready_printer(log_format)))


def storage(
    config: Config = None,
    master: Annotated[str, addresses_flag(help="Channel address of every master.")] = "127.0.0.1:7400",
    listen: Annotated[str, address_flag(help="Block channel. Port 0 picks a free one.")] = ("127.0.0.1:7410"),
    http: Annotated[str, address_flag(help="HTTP: metrics, health.")] = "127.0.0.1:7411",
    data: Annotated[Path, typer.Option(help="Directory of the node's identity and socket; one node each.")] = Path(
        "kvstrata-data"
    ),
    dram: Annotated[int, size_flag(help="Memory for blocks, as 512MiB or 64GiB.")] = 1 << 30,
    ssd: Annotated[
        list[str] | None,
        typer.Option(help="PATH=SIZE: a directory on an SSD, and how much of it; again for each device."),
    ] = None,
    ssd_policy: Annotated[
        SsdPolicy,
        typer.Option(help="When blocks go to SSD: before DRAM is full, at once, or never."),
    ] = SsdPolicy.DEMOTE,
    ssd_daily_writes: Annotated[
        int | None,
        size_flag(help="Bytes a day that may be written to SSD; when short, only blocks used again are."),
    ] = None,
    ssd_key_file: Annotated[
        Path | None,
        typer.Option(help="File of a key, 32 bytes as hex or base64: encrypt what is on SSD."),
    ] = None,
    scrub_rate: Annotated[
        int,
        size_flag(help="Bytes a second of SSD read back to find what has changed there; 0: none."),
    ] = 8 << 20,
    copy_bandwidth: Annotated[
        int,
        size_flag(help="Bytes a second that copies from and to other nodes may take in all; 0: no bound."),
    ] = 256 << 20,
    shared_index: Annotated[
        bool,
        typer.Option(help="Let clients of this host find blocks in memory by themselves. Off: they ask for each."),
    ] = True,
    drain_on_stop: Annotated[
        float,
        typer.Option(help="Seconds that SIGTERM waits for the node's blocks to be saved elsewhere; 0: none.", min=0),
    ] = 0.0,
    eviction: Annotated[
        EvictionOrder,
        typer.Option(help="What leaves first: blocks used once, where that hits more often, or the least recent."),
    ] = EvictionOrder.SEGMENTED,
    rdma: Annotated[
        RailMode,
        typer.Option(
            help="One-sided transfers with clients on other hosts: where there is an RDMA device and NIXL, never, or "
            "always; cma, for tests, is within one host, by the kernel."
        ),
    ] = RailMode.AUTO,
    rdma_backend: Annotated[str, typer.Option(help="NIXL plugin: UCX, or LIBFABRIC for EFA.")] = "UCX",
    rdma_devices: Annotated[
        str,
        typer.Option(help="RDMA devices to use, as mlx5_0,mlx5_1:1; all that are up if empty.", show_default=False),
    ] = "",
    name: Annotated[str | None, typer.Option(help="Node id; kept in the data directory from then on.")] = None,
    hugepages: Annotated[
        bool, typer.Option(help="Back blocks with huge pages: reserved ones, else transparent ones.")
    ] = False,
    slab: Annotated[
        int | None,
        size_flag(help="Bytes of one slab; by default an eighth of --dram."),
    ] = None,
    traces: Traces = "",
    traces_ratio: TracesRatio = 0.0,
    tokens: Tokens = None,
    ticket_keys: TicketKeys = None,
    token_file: TokenOfNode = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    client_certs: ClientCerts = False,
    plain_tokens: PlainTokens = False,
    client_requests: ClientRequests = int(USUAL.requests_s),
    client_connections: ClientConnections = USUAL.connections,
    log_format: Format = LogFormat.text,
    log_level: Level = LogLevel.info,
) -> None:
    """Run a storage node: it holds blocks and serves them to clients."""
    with expected_errors():
        configure_logs(log_format, log_level)
        if dram < DRAM_BYTES_MIN:
            raise ConfigError(f"--dram is {format_size(dram)}: a node needs at least {format_size(DRAM_BYTES_MIN)}")
        from kvstrata.storage.daemon import StorageConfig, run

        files = SecurityFiles(
            tokens=tokens,
            ticket_keys=ticket_keys,
            token_file=token_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            client_certs=client_certs,
            plain_tokens=plain_tokens,
        )
        masters = tuple(master.split(","))
        settings = StorageConfig(
            masters=masters,
            listen=listen,
            http=http,
            data=data,
            dram_bytes=dram,
            name=name,
            hugepages=hugepages,
            slab_bytes=slab,
            ssd=tuple(parse_device(each) for each in ssd or ()),
            ssd_policy=ssd_policy,
            ssd_daily_writes=ssd_daily_writes,
            ssd_key_file=ssd_key_file,
            eviction=eviction,
            scrub_rate=scrub_rate,
            copy_bandwidth=copy_bandwidth,
            drain_on_stop_s=drain_on_stop,
            shared_index=shared_index,
            security=checked(files, (http,), masters=masters),
            bounds=bounds_of(client_requests, client_connections),
            rails=RailOptions(rdma, rdma_backend, tuple(rdma_devices.split(",")) if rdma_devices else ()),
            traces=TraceOptions(traces, traces_ratio),
        )
        raise typer.Exit(run(settings, ready_printer(log_format)))


def parse_device(text: str) -> tuple[Path, int]:
    """The directory and bytes of ``PATH=SIZE``; raises :class:`ConfigError` with an example."""
    path, equals, size = text.rpartition("=")
    if not equals or not path or not size:
        raise ConfigError(f"--ssd {text!r}: write the directory and how much of it to use, as /mnt/nvme0/kv=800GiB")
    return Path(path), parse_size(size)

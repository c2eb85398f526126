"""``kvstrata serve``: the bundled engine behind an OpenAI-compatible server, in the foreground."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.cli.daemons import Config, Format, Level
from kvstrata.cli.output import expected_errors
from kvstrata.cli.process import LogFormat, LogLevel, configure_logs, ready_printer
from kvstrata.cli.security_options import TlsCert, TlsKey
from kvstrata.cli.sizes import address_flag, addresses_flag, size_flag
from kvstrata.cli.trace_option import Traces, TracesRatio
from kvstrata.transfer.traces import TraceOptions


class KVDtype(enum.StrEnum):
    """``--kv-dtype``."""

    float32 = "float32"
    float16 = "float16"


class DeviceChoice(enum.StrEnum):
    """``--device``."""

    cpu = "cpu"
    cuda = "cuda"


class LoadChoice(enum.StrEnum):
    """``--load-policy``, ``--layered-loads``."""

    auto = "auto"
    always = "always"
    never = "never"


_MODEL = "Model"
_CACHE = "The engine's own KV cache"
_STEP = "Steps and ranks"
_POOL = "Pool"
_EVENTS = "KV events"


def serve(
    config: Config = None,
    listen: Annotated[str, address_flag(help="HTTP: the API, metrics, health. Port 0 picks a free one.")] = (
        "127.0.0.1:8000"
    ),
    api_key: Annotated[
        str, typer.Option(help="Key that clients must send. Set it by KVSTRATA_SERVE_API_KEY: flags can be seen.")
    ] = "",
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; by default what --model says.")
    ] = None,
    enable_reset: Annotated[bool, typer.Option(help="Serve POST /reset_prefix_cache.")] = False,
    grace: Annotated[float, typer.Option(help="Seconds that answers may go on after SIGTERM.", min=0)] = 10.0,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    model: Annotated[
        str,
        typer.Option(
            help="Folder with config.json and safetensors, or tiny, tiny-swa, 8m, 13m, 100m: random weights.",
            rich_help_panel=_MODEL,
        ),
    ] = "tiny",
    tokenizer: Annotated[
        str,
        typer.Option(help="A tokenizer.json; by default the model folder's, else bytes.", rich_help_panel=_MODEL),
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of random weights.", min=0, rich_help_panel=_MODEL)] = 0,
    max_model_len: Annotated[
        int, typer.Option(help="Longest prompt and answer, in tokens; 0: what the model can.", rich_help_panel=_MODEL)
    ] = 0,
    kv_dtype: Annotated[KVDtype, typer.Option(help="Of cached KV.", rich_help_panel=_MODEL)] = KVDtype.float32,
    block_size: Annotated[int, typer.Option(help="Tokens a block.", rich_help_panel=_CACHE)] = 16,
    kv_memory: Annotated[int, size_flag(help="Memory for KV, each rank.", rich_help_panel=_CACHE)] = 1 << 30,
    num_blocks: Annotated[
        int, typer.Option(help="Blocks; 0: as many as fit in --kv-memory.", rich_help_panel=_CACHE)
    ] = 0,
    prefix_caching: Annotated[
        bool, typer.Option(help="Keep blocks of finished requests for later ones.", rich_help_panel=_CACHE)
    ] = True,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens a step.", rich_help_panel=_STEP)] = 256,
    max_num_seqs: Annotated[int, typer.Option(help="Requests a step.", rich_help_panel=_STEP)] = 64,
    max_waiting: Annotated[int, typer.Option(help="Requests queued; more are refused.", rich_help_panel=_STEP)] = 4096,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks, a process each.", rich_help_panel=_STEP)] = 1,
    device: Annotated[
        DeviceChoice, typer.Option(help="Where to compute; cuda needs the gpu extra (cupy).", rich_help_panel=_STEP)
    ] = DeviceChoice.cpu,
    threads: Annotated[int, typer.Option(help="BLAS threads a rank.", rich_help_panel=_STEP)] = 1,
    pool: Annotated[
        str | None,
        addresses_flag(help="Channel address of every master; without it there is no pool.", rich_help_panel=_POOL),
    ] = None,
    load_policy: Annotated[
        LoadChoice, typer.Option(help="Load what is faster to load than to compute, or not.", rich_help_panel=_POOL)
    ] = LoadChoice.auto,
    layered_loads: Annotated[
        LoadChoice,
        typer.Option(
            help="Load beside the step that needs it, layer by layer; auto: where it seems to pay.",
            rich_help_panel=_POOL,
        ),
    ] = LoadChoice.never,
    layered_stores: Annotated[
        bool,
        typer.Option(
            "--layered-stores", help="Store beside the step, layer by layer as they are written.", rich_help_panel=_POOL
        ),
    ] = False,
    kv_shards: Annotated[
        int,
        typer.Option(
            help="Cut blocks by heads into so many shards, to share them between tensor-parallel sizes: the largest of "
            "those; 0: a shard a rank.",
            min=0,
            rich_help_panel=_POOL,
        ),
    ] = 0,
    load_deadline_ms: Annotated[
        int, typer.Option(help="A load ends by then; the rest is computed.", rich_help_panel=_POOL)
    ] = 5_000,
    store: Annotated[bool, typer.Option(help="Store computed blocks in the pool.", rich_help_panel=_POOL)] = True,
    kv_events: Annotated[
        str,
        typer.Option(
            help="Publish KV events as vLLM does, here: tcp://HOST:PORT, or a port of loopback.",
            metavar="ENDPOINT",
            rich_help_panel=_EVENTS,
        ),
    ] = "",
    kv_events_replay: Annotated[
        str, typer.Option(help="Send past events again, here.", metavar="ENDPOINT", rich_help_panel=_EVENTS)
    ] = "",
    kv_events_topic: Annotated[
        str, typer.Option(help="Topic of the events, as kv@NAME@MODEL.", rich_help_panel=_EVENTS)
    ] = "",
    name: Annotated[str, typer.Option(help="The engine's name in logs and in the pool.", rich_help_panel=_POOL)] = "",
    traces: Traces = "",
    traces_ratio: TracesRatio = 1.0,
    ignore_traceparent: Annotated[
        bool,
        typer.Option(
            "--ignore-traceparent",
            help="Clients do not decide what is traced: --traces-ratio alone does.",
            rich_help_panel="Traces",
        ),
    ] = False,
    log_format: Format = LogFormat.text,
    log_level: Level = LogLevel.info,
) -> None:
    """Run an engine with an OpenAI-compatible API: its KV cache is the pool's, where one is named."""
    with expected_errors():
        configure_logs(log_format, log_level)
        from kvstrata.engine_adapter.paged.config import (
            CacheConfig,
            EngineConfig,
            KVEventsConfig,
            ModelConfig,
            PoolConfig,
            StepConfig,
        )
        from kvstrata.engine_adapter.serve.daemon import ServeConfig, run

        engine = EngineConfig(
            model=ModelConfig(
                model=model,
                seed=seed,
                tokenizer=tokenizer or _own_tokenizer(model),
                max_model_len=max_model_len,
                kv_dtype=kv_dtype.value,
            ),
            cache=CacheConfig(
                block_size=block_size,
                num_blocks=num_blocks,
                memory_bytes=kv_memory,
                enable_prefix_caching=prefix_caching,
            ),
            step=StepConfig(
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                max_waiting=max_waiting,
            ),
            pool=PoolConfig(
                masters=pool or "",
                load_policy=load_policy.value,
                layered_loads=layered_loads.value,
                layered_stores=layered_stores,
                kv_shards=kv_shards,
                load_deadline_ms=load_deadline_ms,
                store=store,
            ),
            kv_events=KVEventsConfig(endpoint=kv_events, replay=kv_events_replay, topic=kv_events_topic),
            device=device.value,
            tensor_parallel=tensor_parallel,
            threads=threads,
            name=name,
        ).validated()
        settings = ServeConfig(
            engine=engine,
            listen=listen,
            model_name=model if served_model_name is None else served_model_name,
            api_key=api_key,
            allow_reset=enable_reset,
            ignore_traceparent=ignore_traceparent,
            grace_s=grace,
            traces=TraceOptions(traces, traces_ratio),
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
        raise typer.Exit(run(settings, ready_printer(log_format)))


def _own_tokenizer(model: str) -> str:
    """The tokenizer that lies with a model's weights; empty when there is none."""
    file = Path(model) / "tokenizer.json"
    return str(file) if file.is_file() else ""

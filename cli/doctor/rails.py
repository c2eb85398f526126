"""Checks of one-sided transfers: NIXL, RDMA devices, locked memory, and each node over its rails."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from kvstrata.cli.doctor.round_trip import tried
from kvstrata.cli.doctor.rows import Check, Row, Verdict
from kvstrata.cli.masters import tickets
from kvstrata.cli.sizes import format_size
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ConfigError, KVError
from kvstrata.storage.config import memory_available
from kvstrata.transfer.base import Endpoint
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.rdma import nixl
from kvstrata.transfer.rdma.found import HERE, Places, choose, cma_problem, find_devices, find_rails, memlock_problem
from kvstrata.transfer.rdma.owner import open_engine
from kvstrata.transfer.rdma.rails import Device, RailMode, RailOptions
from kvstrata.transfer.rdma.transport import RdmaTransport
from kvstrata.transfer.security.tickets import TicketSource

#: NIXL brings its own libraries, which may hang or end the process they are in: it is tried in another one.
CHILD_S: Final = 12.0
OPEN_S: Final = 5.0
#: No pool is smaller than this where RDMA pays.
MEMLOCK_BYTES_MIN: Final = 1 << 30
#: Beside UCX; a plugin that is there may still lack the library that it drives.
BACKENDS: Final = ("UCX", "LIBFABRIC")
MEANWHILE: Final = "blocks go by tcp meanwhile"
_TRIES_NIXL: Final = "from kvstrata.cli.doctor.rails import say_nixl; say_nixl()"
_TRIES_NODE: Final = "import sys; from kvstrata.cli.doctor.rails import say_node; say_node(sys.argv[1])"


def checks(dram: int | None) -> list[Check]:
    """Of this machine. ``dram``: bytes that a node is to register."""
    return [
        Check("memory", "locked memory", lambda: locked_memory(dram)),
        Check("devices", "RDMA", rdma),
        Check("devices", "NIXL", nixl_here, CHILD_S + 2),
    ]


# ---------------------------------------------------------------- this machine


def locked_memory(dram: int | None, places: Places = HERE) -> Iterator[Row]:
    """RDMA registers memory by locking it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"{'no limit' if soft == resource.RLIM_INFINITY else format_size(soft)} may be locked"
    needed = memory_available() if dram is None else dram
    problem = memlock_problem(needed, soft, places)
    advice = (
        "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, or the container's --ulimit memlock=-1), "
        "or give the process CAP_IPC_LOCK"
    )
    if not problem:
        more = "" if soft == resource.RLIM_INFINITY or soft >= needed else ", and CAP_IPC_LOCK goes beyond it"
        yield Row("memory", "locked memory", Verdict.OK, found + more)
    elif dram is None and not find_devices(places):
        yield Row("memory", "locked memory", Verdict.OK, f"{found}: without an RDMA device nothing needs it")
    elif dram is not None or soft < MEMLOCK_BYTES_MIN:
        short = f"{found}: too little to register {format_size(dram or MEMLOCK_BYTES_MIN)} for RDMA"
        yield Row("memory", "locked memory", Verdict.PROBLEM, short, advice)
    else:
        short = f"{found}: a node with a larger --dram cannot register it for RDMA"
        yield Row("memory", "locked memory", Verdict.WARNING, short, f"{advice}; --dram tells what is needed")


def rdma(places: Places = HERE) -> Iterator[Row]:
    there = places.infiniband.is_dir() and any(places.infiniband.iterdir())
    devices, problem = choose(find_devices(places), (), places)
    if not there:
        yield Row("devices", "RDMA", Verdict.NOT_APPLICABLE, "no device")
    elif problem:
        yield Row("devices", "RDMA", Verdict.WARNING, problem, f"until then {MEANWHILE}")
    else:
        yield Row("devices", "RDMA", Verdict.OK, ", ".join(map(_said, devices)))


def _said(device: Device) -> str:
    numa = f"NUMA node {device.numa}" if device.numa >= 0 else "NUMA node unknown"
    return f"{device.name}:{device.port} ({device.link}, {device.rate}, {numa})"


def nixl_here(places: Places = HERE) -> Iterator[Row]:
    """An agent is opened: over the RDMA device, or else between processes of this machine."""
    devices = bool(find_devices(places))
    if not nixl.installed():
        verdict = Verdict.WARNING if devices else Verdict.NOT_APPLICABLE
        yield Row("devices", "NIXL", verdict, "not installed", f"for RDMA: {nixl.ADVICE}" if devices else "")
        return
    told = _child(_TRIES_NIXL)
    found = f"{told['version']}, plugins {', '.join(told['plugins'])}" if told.get("version") else "installed"
    if problem := told.get("problem"):
        verdict = Verdict.PROBLEM if devices else Verdict.WARNING
        advice = "UCX_LOG_LEVEL=info kvstrata doctor says more; look at UCX_ variables that are set"
        yield Row("devices", "NIXL", verdict, f"{found}: {problem}", advice)
    else:
        yield Row("devices", "NIXL", Verdict.OK, f"{found}; an agent opens over {told['opened']}")


def say_nixl() -> None:
    """The child's part: print what there is, as JSON."""
    print(json.dumps(_tried_nixl()))


def _tried_nixl() -> dict[str, Any]:
    package = nixl.installed()
    told: dict[str, Any] = {"version": f"{package} {importlib.metadata.version(package.replace('_', '-'))}"}
    try:
        told["plugins"] = _plugins()
        rails = find_rails(RailOptions())
        if not rails.kind:
            if problem := cma_problem():
                return told | {"opened": "nothing", "problem": problem}
            rails = find_rails(RailOptions(mode=RailMode.CMA))
        open_engine("kvstrata-doctor", rails, RailOptions()).close()
    except KVError as error:
        return told | {"problem": str(error)}
    return told | {"opened": rails.kind}


def _plugins() -> list[str]:
    """Those of NIXL's that kvstrata can be told to use."""
    native = nixl.bindings()
    config = native.nixlAgentConfig()
    config.useProgThread = False
    there = native.nixlAgent("kvstrata-doctor-plugins", config).getAvailPlugins()
    return [name for name in BACKENDS if name in there]


# ---------------------------------------------------------------- a node


def of_node(
    endpoint: Endpoint, hello: pb.HelloOk, health: dict[str, Any], *, round_trip: bool, masters: str = ""
) -> Iterator[Row]:
    """Open rails to it, as a client does: both sides read known bytes of each other first. ``masters``: where the
    process that does it gets a ticket, if the caller shows a token."""
    what = f"{endpoint.node_id}: rdma"
    said: dict[str, Any] = health.get("rails") or {}
    if not hello.rails:
        why = said.get("problem") or "its version knows none"
        yield Row("nodes", what, Verdict.NOT_APPLICABLE, f"the node has no rails: {why}")
        return
    if hello.rails == "cma" and endpoint.boot_id != boot_id():
        yield Row("nodes", what, Verdict.NOT_APPLICABLE, "--rdma cma is between processes of the node's host alone")
        return
    mode = RailMode.CMA if hello.rails == "cma" else RailMode.ON
    backend = str(said.get("backend") or "UCX")
    try:
        find_rails(RailOptions(mode=mode, backend=backend))
    except ConfigError as error:
        yield Row("nodes", what, Verdict.WARNING, f"the node has rails ({hello.rails}), and here: {error}", MEANWHILE)
        return
    asked = {"endpoint": asdict(endpoint), "mode": mode.value, "backend": backend, "round_trip": round_trip}
    asked["masters"] = masters
    told = _child(_TRIES_NODE, json.dumps(asked))
    if problem := told.get("problem"):
        yield Row("nodes", what, Verdict.PROBLEM, problem, f"see docs/transport.md; {MEANWHILE}")
        return
    for row in told["rows"]:
        yield Row(row["area"], row["what"], Verdict(row["verdict"]), row["found"], row["advice"])


def say_node(asked: str) -> None:
    """The child's part: print rows as JSON."""
    given = json.loads(asked)
    options = RailOptions(mode=RailMode(given["mode"]), backend=given["backend"])
    with tickets(given["masters"]) as shown:
        rows = _tried_node(Endpoint(**given["endpoint"]), options, shown, round_trip=given["round_trip"])
    print(json.dumps({"rows": [row.as_json() for row in rows]}))


def _tried_node(endpoint: Endpoint, options: RailOptions, shown: TicketSource | None, *, round_trip: bool) -> list[Row]:
    what = f"{endpoint.node_id}: rdma"
    transport = RdmaTransport(Identity.new("client", "kvstrata doctor", shown), options, only=True)
    peer = transport.connect(endpoint)
    try:
        began = time.monotonic()
        opened = peer.rails.wait(began + OPEN_S)
        took_ms = (time.monotonic() - began) * 1e3
        if opened is None:
            problem = peer.rails.problem or f"not open within {OPEN_S:g} s"
            advice = f"see docs/transport.md; {MEANWHILE}"
            return [Row("nodes", what, Verdict.PROBLEM, f"rails ({options.mode.value}): {problem}", advice)]
        found = f"self-test passed both ways, rails ({opened.agent.engine.kind}) open in {took_ms:.0f} ms"
        rows = [Row("nodes", what, Verdict.OK, found)]
        if round_trip:
            rows.append(tried(transport, endpoint))
        return rows
    finally:
        peer.close()
        transport.close()


def _child(code: str, *arguments: str) -> dict[str, Any]:
    """What it prints, or ``problem``: why it does not."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=CHILD_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"NIXL hangs: no answer within {CHILD_S:g} s"}
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return {"problem": f"a process that uses NIXL ended with {done.returncode}: {last}"}

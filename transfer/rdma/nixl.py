"""NIXL, behind :class:`kvstrata.transfer.rdma.agent.Agent`. The only module that imports it.

The package's own Python class starts a progress thread that spins a core, so this drives the bindings below it: no
thread, the owner makes progress.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstrata.proto.errors import ConfigError, Unavailable
from kvstrata.transfer.gpu.runtimes import runtime_of
from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.rdma.agent import AgentError, BadMetadata, PeerGone
from kvstrata.transfer.rdma.engine import Pieces
from kvstrata.transfer.rdma.rails import RailOptions, Rails

#: Wheels by CUDA version, and the package that picks one.
PACKAGES: Final = ("nixl_cu12", "nixl_cu13", "nixl")
ADVICE: Final = (
    "pip install 'kvstrata[rdma]' (the wheel asks for torch; pip install --no-deps nixl-cu12 does without it)"
)
#: tcp is for the first contact alone: the kernel's cross-memory attach is quicker, so UCX takes it for the bytes.
CMA_TRANSPORTS: Final = "cma,posix,sysv,self,tcp"
#: NIXL refuses transports without CUDA on a machine that has such a GPU.
CUDA_TRANSPORTS: Final = ",cuda_copy,cuda_ipc"
_NVIDIA: Final = Path("/proc/driver/nvidia")
_environment = threading.Lock()


def installed() -> str:
    """The package that is there, "" for none. Imports nothing."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), "")


def bindings() -> Any:
    """NIXL's native module; raises :class:`Unavailable` with what to install."""
    problems = []
    for name in PACKAGES:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            problems.append(f"{name} does not load: {error}")
    raise Unavailable("; ".join(problems) or f"NIXL is not installed: {ADVICE}")


def version() -> str:
    """Of the package that is there, "" for none."""
    for name in PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


class NixlAgent:
    """See :class:`kvstrata.transfer.rdma.agent.Agent`. Used by one thread at a time."""

    def __init__(self, name: str, rails: Rails, options: RailOptions) -> None:
        self.version = version()
        self._b: Any = bindings()
        config = self._b.nixlAgentConfig()
        config.useProgThread = config.useListenThread = False
        config.syncMode = self._b.NIXL_THREAD_SYNC_STRICT
        self._errors: tuple[type[Exception], ...] = _errors(self._b)
        self._gone = self._b.nixlRemoteDisconnectError
        with self._told(f"agent {name} could not be made"):
            self._agent: Any = self._b.nixlAgent(name, config)
            with _told_ucx(rails):
                known, _ = self._agent.getPluginParams(options.backend)
                chosen = {**known, **backend_options(rails, options)}
                self._backends = [self._agent.createBackend(options.backend, chosen)]
        # Held once more: a forked child, or an interpreter that ends, must not end what a device still writes for.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))

    def metadata(self) -> bytes:
        with self._told("its metadata cannot be had"):
            return bytes(self._agent.getLocalMD())

    def connection(self) -> bytes:
        with self._told("its metadata cannot be had"):
            none = self._b.nixlRegDList(self._b.DRAM_SEG, [])
            return bytes(self._agent.getLocalPartialMD(none, True, self._backends))

    def register(self, address: int, nbytes: int, memory: Memory) -> object:
        if not memory.on_host:
            _retain(memory)
        memories = self._b.nixlRegDList(self._segment(memory), [(address, nbytes, memory.device, "")])
        with self._told(f"{nbytes} bytes of {memory.spelled() or 'host'} memory cannot be registered"):
            self._check(self._agent.registerMem(memories, self._backends))
        return memories

    def describe(self, handle: object) -> bytes:
        with self._told("its metadata cannot be had"):
            return bytes(self._agent.getLocalPartialMD(handle, False, self._backends))

    def deregister(self, handle: object) -> None:
        with self._told("memory cannot be deregistered"):
            self._check(self._agent.deregisterMem(handle, self._backends))

    def load(self, metadata: bytes) -> str:
        with self._told("another agent cannot be met"):
            try:
                return str(self._agent.loadRemoteMD(metadata).decode())
            except (self._b.nixlMismatchError, self._b.nixlInvalidParamError) as error:
                raise BadMetadata(f"an agent's metadata cannot be read: {error}") from error

    def forget(self, peer: str) -> None:
        with self._told(f"agent {peer} cannot be forgotten"):
            self._agent.invalidateRemoteMD(peer)  # one that is not known is an answer, not an error

    def create(self, peer: str, local: Pieces, remote: Pieces) -> object:
        with self._told(f"agent {peer}: memory that one of the two has not registered"):
            mine, theirs = self._descriptors(local), self._descriptors(remote)
            return self._agent.createXferReq(self._b.NIXL_READ, mine, theirs, peer, b"", self._backends)

    def post(self, transfer: object) -> bool:
        with self._told("a read cannot be posted"):
            return self._ended(self._agent.postXferReq(transfer, b""))

    def poll(self, transfer: object) -> bool:
        with self._told("a read failed"):
            return self._ended(self._agent.getXferStatus(transfer))

    def release(self, transfer: object) -> None:
        with self._told("a read cannot be released"):
            self._agent.releaseXferReq(transfer)

    def progress(self) -> None:
        with self._told("no progress can be made"):
            self._agent.getNotifs({}, self._backends)

    def close(self) -> None:
        agent, self._agent = self._agent, None
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(agent))

    def _descriptors(self, pieces: Pieces) -> object:
        table = np.empty((len(pieces.address), 3), np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = pieces.address, pieces.length, pieces.memory.device
        return self._b.nixlXferDList(self._segment(pieces.memory), table)

    def _segment(self, memory: Memory) -> object:
        return self._b.DRAM_SEG if memory.kind == HOST.kind else self._b.VRAM_SEG

    def _ended(self, status: object) -> bool:
        if status == self._b.NIXL_IN_PROG:
            return False
        self._check(status)
        return True

    def _check(self, status: object) -> None:
        if status != self._b.NIXL_SUCCESS:
            raise AgentError(str(status))

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except BadMetadata:
            raise
        except self._gone as error:
            raise PeerGone(f"{what}: {error}") from error
        except self._errors as error:
            raise AgentError(f"{what}: {error}") from error


def backend_options(rails: Rails, options: RailOptions) -> dict[str, str]:
    """What the plugin is told beside its defaults."""
    if options.backend != "UCX":
        return {}
    told = {"ucx_error_handling_mode": "peer", "num_workers": str(options.workers)}
    if rails.kind == "rdma":
        told["ucx_devices"] = ",".join(f"{device.name}:{device.port}" for device in rails.devices)
        told["engine_config"] = "TLS=^tcp"  # an environment that names transports goes before it
    return told


@contextmanager
def _told_ucx(rails: Rails) -> Iterator[None]:
    """While the plugin is loaded and the backend made: what UCX takes from the environment alone."""
    with _environment:
        added = ucx_environment(rails, os.environ, _NVIDIA)
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def ucx_environment(rails: Rails, environment: Mapping[str, str], nvidia: Path) -> dict[str, str]:
    """What is to be added to ``environment``; what the user has set stays.

    Standard output is the program's: UCX would log there. Transports for cma are a list, which no option can spell.
    UCX's module for EFA takes libefa, and with it a second libnl, from the system where there is one: a process with
    both dies of SIGSEGV when it ends.
    """
    told = {"UCX_LOG_FILE": "stderr", "UCX_MODULES": "^efa"}
    if rails.kind == "cma":
        told["UCX_TLS"] = CMA_TRANSPORTS + (CUDA_TRANSPORTS if nvidia.exists() else "")
    return {name: value for name, value in told.items() if name not in environment}


def _retain(memory: Memory) -> None:
    """The device's context is current in this thread, where NIXL and UCX look for it."""
    try:
        runtime_of(memory).retain()
    except Unavailable as error:
        raise AgentError(f"{memory.spelled()} memory cannot be registered: {error}") from error


def _errors(native: Any) -> tuple[type[Exception], ...]:
    """All that a call of the bindings raises."""
    names = [name for name in dir(native) if name.startswith("nixl") and name.endswith("Error")]
    own: list[type[Exception]] = [getattr(native, name) for name in names]
    return (*own, AgentError, RuntimeError, ValueError, TypeError)


def new_agent(name: str, rails: Rails, options: RailOptions) -> NixlAgent:
    """Raises :class:`ConfigError` without rails, :class:`Unavailable` when the agent cannot be made."""
    if not rails.kind:
        raise ConfigError(f"no one-sided transfers: {rails.problem}")
    try:
        return NixlAgent(name, rails, options)
    except AgentError as error:
        raise Unavailable(f"{error} ({options.backend} over {rails.kind}; UCX_LOG_LEVEL=info says more)") from error

"""A node's rails at its start: what the machine has, and the agent over it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstrata.proto.errors import ConfigError, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.storage.state import NodeState
from kvstrata.transfer.rdma.engine import RailEngine
from kvstrata.transfer.rdma.found import find_rails, memlock_problem
from kvstrata.transfer.rdma.owner import open_engine
from kvstrata.transfer.rdma.rails import RailMode, RailOptions, Rails

log = get_logger(__name__)

Finder = Callable[[RailOptions], Rails]
Opener = Callable[[str, Rails, RailOptions], RailEngine]


def open_rails(
    name: str,
    options: RailOptions,
    state: NodeState,
    lock: threading.Lock,
    *,
    find: Finder = find_rails,
    opener: Opener = open_engine,
) -> tuple[NodeRails | None, str]:
    """Rails by an agent called ``name``, or None and why there are none.

    Raises :class:`ConfigError`, with what to do, when the operator asked for them and they cannot be had.
    """
    found = find(options)
    if not found.kind:
        return None, found.problem
    try:
        if found.kind == "rdma" and (problem := memlock_problem(state.arena.bytes_total)):
            raise Unavailable(problem)
        rails = NodeRails(opener(name, found, options), found, state, lock)
    except Unavailable as error:
        if options.mode is not RailMode.AUTO:
            raise ConfigError(f"--rdma {options.mode.value}: {error}") from error
        log.warning("rdma is off", reason=str(error))
        return None, str(error)
    log.info("rdma is on", kind=found.kind, devices=[device.name for device in found.devices], agent=name)
    return rails, ""

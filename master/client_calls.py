"""What clients call, by channel or gRPC: open a namespace, look up, place, report a miss, remove."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master import messages as m
from kvstrata.master.content.lookups import LookedUp
from kvstrata.master.directory.probing import Keys
from kvstrata.master.hub import Hub
from kvstrata.master.namespaces import Opened
from kvstrata.master.placement import Placed
from kvstrata.master.reuse.lookup_log import Call
from kvstrata.master.state import MasterState
from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import HASHES_MAX, Namespace, check_salt

REMOVE_DEADLINE_MAX_S: Final = 10.0

_Nodes = dict[int, m.NodeFacts]  #: by directory slot


@dataclass(frozen=True, slots=True)
class Removed:
    removed: int
    unreached: list[str]


class ClientCalls:
    """Thread-safe: everything goes through the hub's lock. What is asked is checked before."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def open_namespace(self, namespace: Namespace, by: str = "") -> Opened:
        """Register a namespace and name it, for the subject ``by``. Raises as :meth:`MasterState.open_namespace`."""
        return self._hub.change(lambda state, now: state.open_namespace(namespace, by))

    def opened(self, handle: int) -> Opened:
        """What a handle names. Raises as :meth:`Namespaces.by_handle`."""
        return self._hub.read(lambda state, now: state.namespaces.by_handle(handle))

    def lookup(
        self,
        opened: Opened,
        salt: str,
        hashes: bytes,
        boot_id: str,
        epoch: int | None = None,
        request: str = "",
        avoid: Collection[m.Process] = (),
    ) -> tuple[LookedUp, _Nodes]:
        """Where blocks are, and the nodes that the codes' slots name.

        ``epoch`` is what the asker's handle is pinned to; a named ``request`` can be explained later.
        ``avoid`` as for :meth:`Questions.lookup`.
        """
        began = time.perf_counter()
        check_salt(salt)
        keys = fold(hashes, whole_hashes(hashes, opened.namespace.hash_bytes))

        def ask(state: MasterState, now: float) -> tuple[LookedUp, _Nodes, float]:
            questions, group = state.questions, opened.group.number
            answer = questions.lookup(opened.namespace, group, salt, keys, boot_id, now, epoch, avoid)
            questions.asked(opened, salt, hashes, now)
            if request:
                questions.note_lookup(request, opened, salt, keys, answer, now)
            return answer, state.membership.slot_facts, now

        answer, facts, now = self._hub.read(ask)
        self._hub.metrics.looked_up(answer, time.perf_counter() - began, request)
        if not answer.not_yet:
            self._log(opened, salt, keys, answer.found.present, now)
        return answer, facts

    def place(
        self,
        opened: Opened,
        salt: str,
        hashes: bytes,
        boot_id: str,
        epoch: int | None = None,
        avoid: Collection[m.Process] = (),
        writer: int = 0,
        unasked: bytes = b"",
    ) -> tuple[Placed, _Nodes]:
        """Where to store blocks, and the nodes that the codes' slots name. ``unasked``: hashes of what the writer sent
        to the pool's one node since it asked. Raises as :meth:`Questions.place`, and :class:`NotLeader` when another
        master leads: its placement is the better one."""
        check_salt(salt)
        width = opened.namespace.hash_bytes
        keys = fold(hashes, whole_hashes(hashes, width))
        went = fold(unasked, whole_hashes(unasked, width)) if unasked else None

        def ask(state: MasterState, now: float) -> tuple[tuple[Placed, _Nodes, float], list[m.Command]]:
            group = opened.group.number
            placed = state.questions.place(opened.namespace, group, salt, keys, boot_id, now, epoch, avoid, writer)
            return (placed, state.membership.slot_facts, now), state.taken()

        placed, facts, now = self._hub.order(ask, durable=False, or_none=True)
        if went is not None:
            self._hub.metrics.went(len(went))
            self._log(opened, salt, went, None, now)
        self._hub.metrics.placed(placed.states)
        self._log(opened, salt, keys, None, now)
        return placed, facts

    def _log(self, opened: Opened, salt: str, keys: Keys, present: npt.NDArray[np.bool_] | None, now: float) -> None:
        """Have a call heard for the what-if predictions, later."""
        if not len(keys):
            return
        nbytes = opened.namespace.block_bytes * opened.namespace.shard_count
        self._hub.lookup_log.put(Call(opened.group.number, salt, keys, present, nbytes, now))

    def miss(self, report: m.MissReport) -> None:
        """A client did not get, or could not store, what it was told of."""
        opened = self.opened(report.handle)
        check_salt(report.salt)
        whole_hashes(report.hashes, opened.namespace.hash_bytes)
        self._hub.handle(report)

    def remove(self, opened: Opened, salt: str, hashes: bytes, deadline_s: float) -> Removed:
        """Remove blocks everywhere; waits at most ``deadline_s`` for the attached nodes to confirm.

        Raises :class:`Unavailable` when nodes are away and the store cannot remember the removal for them.
        """
        check_salt(salt)
        whole_hashes(hashes, opened.namespace.hash_bytes)
        deadline = time.monotonic() + min(deadline_s, REMOVE_DEADLINE_MAX_S)
        removal = self._hub.order(lambda state, now: state.remove(opened.namespace, salt, hashes, now), durable=False)
        unreached = self._hub.confirmations(removal.command, removal.awaited, deadline)
        if unreached and not self._hub.durable():
            problem = self._hub.why_not_durable()
            raise Unavailable(f"removed, but {', '.join(unreached)} may not learn of it after a restart: {problem}")
        return Removed(removal.removed, unreached)


def whole_hashes(hashes: bytes, hash_bytes: int) -> int:
    """``hash_bytes``, if ``hashes`` is a whole number of them within the bound."""
    if len(hashes) % hash_bytes:
        raise InvalidArgument(f"hashes are {len(hashes)} bytes: not a multiple of hash_bytes = {hash_bytes}")
    if len(hashes) > HASHES_MAX * hash_bytes:
        raise InvalidArgument(f"{len(hashes) // hash_bytes} hashes in one call: at most {HASHES_MAX} are allowed")
    return hash_bytes

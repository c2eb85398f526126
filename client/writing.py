"""Writes: ask where, then push each contiguous run to its node, several nodes at once; what a node that leaves or is
lost did not take is placed once more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.client import moving
from kvstrata.client.counters import Counters
from kvstrata.client.directory import Directory
from kvstrata.client.fanout import Fanout
from kvstrata.client.locations import Hint, Placed, RecentLocations, chosen
from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.outcomes import WHOLE_CALL, refused_late, status_of, unanswered
from kvstrata.client.peers import Peers
from kvstrata.client.placing import Placer
from kvstrata.client.plan import Part, gather, stripes
from kvstrata.proto.errors import KVError
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus, PlaceState
from kvstrata.transfer.base import Endpoint, Landing, Mask, Peer, Push, Pushed
from kvstrata.transfer.regions import BlockView

log = get_logger(__name__)

_UNKNOWN: Final = int(BlockStatus.UNKNOWN)
_STORED: Final = int(BlockStatus.STORED)
_PRESENT: Final = int(BlockStatus.ALREADY_PRESENT)
_IN_FLIGHT: Final = int(BlockStatus.IN_FLIGHT)
_FULL: Final = int(BlockStatus.FULL)
_QUOTA: Final = int(BlockStatus.QUOTA)
_NODE_LOST: Final = int(BlockStatus.NODE_LOST)
_REFUSED: Final = int(BlockStatus.REFUSED)
#: What placement says: a node takes it, or has it; another writer stores it; nobody has room.
_TAKEN: Final = (int(PlaceState.NEW), int(PlaceState.PRESENT))
_AT_OTHERS: Final = int(PlaceState.IN_FLIGHT)
_NOWHERE: Final = int(PlaceState.NOWHERE)
#: Values of bytes that ``bytes.translate`` is to leave out: what is left of the rest says whether there is any.
_HELD: Final = bytes((_STORED, _PRESENT))
_NOT_REFUSED: Final = bytes((_STORED, _PRESENT, _IN_FLIGHT))
#: Statuses after which another node may take the block: by value.
_ELSEWHERE: Final = np.zeros(256, bool)
_ELSEWHERE[[_REFUSED, _NODE_LOST]] = True


@dataclass(slots=True)
class Offered:
    """One write call. ``parent``: the hash before the first; ``first_index``: the first's place in its chain.
    ``parts``, ``written``: as of :class:`Push`. ``pending``: what was given up and may still read."""

    namespace: PoolNamespace
    salt: str
    hashes: bytes
    blocks: BlockView
    deadline: float
    parent: bytes
    first_index: int
    limit: int
    parts: tuple[int, ...] = ()
    written: Callable[[int, float], bool] | None = None
    pending: list[Landing] = field(default_factory=list)


class Writer:
    """Thread-safe: all state of a call is on its stack."""

    def __init__(
        self,
        directory: Directory,
        placer: Placer,
        peers: Peers,
        recent: RecentLocations,
        fanout: Fanout,
        counters: Counters,
    ) -> None:
        self._counters = counters
        self._directory = directory
        self._placer = placer
        self._peers = peers
        self._recent = recent
        self._fanout = fanout

    def write(self, offered: Offered) -> Pushed:
        """Offer every block to its node, also those that are there already: their node marks them used.

        Raises only refusals of the whole call, and those only when nothing of it is ``pending``: else what they left
        undecided is REFUSED. Every position of ``status`` is decided; no source byte is read after the return, but of
        what is PENDING.
        """
        status, durable = np.zeros(len(offered.blocks), np.uint8), np.zeros(len(offered.blocks), bool)
        moved = 0
        try:
            moved = self._write(offered, status, durable)
        except Exception as error:
            if not offered.pending:
                raise
            refused_late("store", error)
            status[status == _UNKNOWN] = _REFUSED
        return Pushed(status, moved, durable, tuple(offered.pending))

    def _write(self, offered: Offered, status: npt.NDArray[np.uint8], durable: Mask) -> int:
        """Decides every position of ``status``; returns the bytes moved."""
        placed = self._place(offered, status, self._peers.lost())
        if placed is None:
            return 0
        states = self._states(offered, placed)
        nowhere = None
        if not placed.code or placed.state not in _TAKEN:
            status[states == _AT_OTHERS] = _IN_FLIGHT
            nowhere = (states == _NOWHERE) | ((placed.codes == 0) & (status == _UNKNOWN))
            if nowhere.any():
                status[nowhere] = BlockStatus.FULL if self._any_node(placed) else BlockStatus.NODE_LOST
        moved, where = self._send(offered, placed, states, status, durable), Hint(placed.codes, placed.nodes)
        if not status.tobytes().translate(None, _HELD):
            self._remember(offered, where)
            return moved
        refused = _ELSEWHERE[status] if nowhere is None else _ELSEWHERE[status] & ~nowhere
        if refused.any() and time.monotonic() < offered.deadline:
            more, where = self._elsewhere(offered, where, refused, status, durable)
            moved += more
        status[status == _UNKNOWN] = _REFUSED  # a state this version does not know
        held = (status == _STORED) | (status == _PRESENT)
        if held.any():
            self._remember(offered, Hint(np.where(held, where.codes, 0).astype(np.uint16), where.nodes))
        return moved

    def _remember(self, offered: Offered, held: Hint) -> None:
        """Where blocks of the call are now."""
        namespace = offered.namespace
        self._recent.remember(
            namespace, offered.salt, offered.hashes, held.codes, held.nodes, epoch=namespace.epoch, stored=True
        )

    def _send(
        self,
        offered: Offered,
        placed: Placed,
        states: npt.NDArray[np.uint8],
        status: npt.NDArray[np.uint8],
        durable: Mask,
    ) -> int:
        groups = stripes(placed.codes, states, offered.limit)
        tasks = [partial(self._serve, offered, placed.nodes[runs[0].node], runs, status, durable) for runs in groups]
        return sum(self._fanout.run(tasks))

    def _elsewhere(
        self, offered: Offered, first: Hint, refused: Mask, status: npt.NDArray[np.uint8], durable: Mask
    ) -> tuple[int, Hint]:
        """Offer what its nodes ``refused`` (bool[n]) to other nodes, once: bytes moved, and where all blocks are."""
        codes, nodes, _ = first
        avoid = {nodes[(code - 1) >> 2] for code in np.unique(codes[refused & (codes != 0)]).tolist()}
        try:
            again = self._ask(offered, self._peers.avoiding(avoid))
        except WHOLE_CALL:
            raise
        except KVError as error:
            log.debug("not placed again", reason=f"{type(error).__name__}: {error}")
            return 0, first
        others = np.array([False, *(node not in avoid for node in again.nodes for _ in range(4))])
        taken = refused & others[again.codes]
        again = Placed(np.where(taken, again.codes, 0).astype(np.uint16), again.states, again.nodes)
        status[taken & (again.states == _AT_OTHERS)] = _IN_FLIGHT
        moved = self._send(offered, again, again.states, status, durable)
        return moved, chosen(first, Hint(again.codes, again.nodes), taken)

    def _ask(self, offered: Offered, avoid: Sequence[Endpoint]) -> Placed:
        return self._placer.place(offered.namespace, offered.salt, offered.hashes, offered.deadline, avoid)

    def _place(self, offered: Offered, status: npt.NDArray[np.uint8], avoid: Sequence[Endpoint]) -> Placed | None:
        """Where each block goes; with no master the node on this host. None: nowhere, ``status`` says why."""
        try:
            return self._ask(offered, avoid)
        except WHOLE_CALL:
            raise
        except KVError as error:
            local = self._peers.sole_local()
            if local is None or offered.namespace.pin.epoch is None:
                status[:] = unanswered(error)
                return None
        # Surplus replicas are legal, and the node announces what it has once a master is back.
        count = len(status)
        return Placed(np.ones(count, np.uint16), np.zeros(count, np.uint8), (local.endpoint,))

    def _states(self, offered: Offered, placed: Placed) -> npt.NDArray[np.uint8]:
        """The master's word, but what this client just stored itself is there, not in another writer's flight:
        the directory has not heard of it yet."""
        if _AT_OTHERS in placed.states.tobytes():
            in_flight = placed.states == _AT_OTHERS
            namespace = offered.namespace
            hint = self._recent.find(namespace, offered.salt, offered.hashes, epoch=namespace.epoch)
            if hint is not None:
                return np.where(in_flight & (hint.codes != 0), np.uint8(PlaceState.PRESENT), placed.states)
        return placed.states

    def _any_node(self, placed: Placed) -> bool:
        return bool(placed.nodes) or self._peers.any_reachable()

    def _serve(
        self, offered: Offered, node: Endpoint, runs: list[Part], status: npt.NDArray[np.uint8], durable: Mask
    ) -> int:
        """All runs of one node, in order; returns the bytes moved."""
        peer = self._peers.get(node)
        moved = 0
        for run in runs:
            assert isinstance(run.where, slice)
            if peer is None:
                status[run.where] = BlockStatus.NODE_LOST
                continue
            moved += self._push_all(peer, offered, run.where, status, durable)
            ended = status[run.where]
            if not ended.tobytes().translate(None, _NOT_REFUSED):
                continue
            if (ended == _NODE_LOST).any():
                self._peers.lose(node)
            self._report_refused(offered, node, run.where, ended)
        return moved

    def _report_refused(self, offered: Offered, node: Endpoint, run: slice, status: npt.NDArray[np.uint8]) -> None:
        """Tell the master what will not come, or it tells every writer for a while that it is in flight."""
        refused = (status != _STORED) & (status != _PRESENT) & (status != _IN_FLIGHT)
        namespace = offered.namespace
        for code in np.unique(status[refused]).tolist():
            hashes = gather(offered.hashes, namespace.hash_bytes, np.flatnonzero(status == code) + run.start)
            self._directory.report_miss(
                namespace, offered.salt, hashes, node, 0, offered.deadline, status=BlockStatus(code), at_store=True
            )

    def _push_all(self, peer: Peer, offered: Offered, run: slice, status: npt.NDArray[np.uint8], durable: Mask) -> int:
        """Push a run, and again what its node had no room for while the rest of this very run came to lie on SSD:
        for that there is room in memory now. Each turn stores something. Returns the bytes moved."""
        moved, left = 0, run
        while True:
            part = self._push(peer, offered, left)
            status[left] = part.status
            if part.durable is not None:
                durable[left] = part.durable
            moved += part.bytes_moved
            rest = _left_out(left, part)
            if rest is None or time.monotonic() >= offered.deadline:
                return moved
            left = rest

    def _push(self, peer: Peer, offered: Offered, run: slice) -> Pushed:
        width = offered.namespace.hash_bytes
        first: int = run.start
        whole = run.stop - first == len(offered.blocks)
        push = Push(
            namespace=offered.namespace,
            salt=offered.salt,
            hashes=offered.hashes if whole else gather(offered.hashes, width, run),
            blocks=offered.blocks if whole else offered.blocks[run],
            deadline=offered.deadline,
            parent=offered.hashes[(first - 1) * width : first * width] if first else offered.parent,
            first_index=offered.first_index + first,
            epoch=offered.namespace.epoch,
            parts=offered.parts,
            written=offered.written,
        )
        try:
            pushed = moving.push(peer, push, self._counters)
        except WHOLE_CALL:
            raise
        except KVError as error:
            log.warning("store failed", node=peer.endpoint.node_id, reason=f"{type(error).__name__}: {error}")
            return Pushed(np.full(len(push.blocks), status_of(error), np.uint8))
        offered.pending.extend(pushed.pending)
        return pushed


def _left_out(run: slice, pushed: Pushed) -> slice | None:
    """From the first block that found no room on, if others of the call have become durable."""
    durable = pushed.durable
    if durable is None or not durable.any() or not durable[pushed.status == _STORED].any():
        return None
    refused = np.flatnonzero((pushed.status == _FULL) | (pushed.status == _QUOTA))
    return slice(run.start + int(refused[0]), run.stop) if refused.size else None

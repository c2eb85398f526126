"""Reads: from where the last lookup said, or the local node, or a fresh lookup; failures go to other replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.client.asked import Asked
from kvstrata.client.directory import Directory
from kvstrata.client.fanout import Fanout
from kvstrata.client.locations import U16, Hint, Located, RecentLocations, chosen
from kvstrata.client.outcomes import WHOLE_CALL, refused_late, status_of, unanswered
from kvstrata.client.peers import Peers
from kvstrata.client.plan import Part, Positions, Where, by_node, gather, memory_first, pieces_of_node, positions_of
from kvstrata.client.read_ahead import ReadAhead
from kvstrata.client.results import NO_TIER
from kvstrata.proto.errors import KVError
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.transfer.base import Endpoint, Fetched, Landing, Mask, Peer

log = get_logger(__name__)

_UNKNOWN: Final = int(BlockStatus.UNKNOWN)
_LOADED: Final = int(BlockStatus.LOADED)
_MISSING: Final = int(BlockStatus.MISSING)
_EVICTED: Final = int(BlockStatus.EVICTED)
_READ_ERROR: Final = int(BlockStatus.READ_ERROR)
_NO_ROOM: Final = int(BlockStatus.NO_ROOM)
_NODE_LOST: Final = int(BlockStatus.NODE_LOST)
_PENDING: Final = int(BlockStatus.PENDING)
_SSD: Final = int(Tier.SSD)

#: What is read from SSD comes in pieces of so many bytes: one is copied while the node reads the next.
PIECE_BYTES: Final = 32 << 20
#: The last ones are smaller, down to this: nothing is read any more while the last one is copied.
LAST_PIECE_BYTES: Final = 8 << 20
#: Blocks for which a node had no room are asked for again so often, in ever smaller pieces.
ROOM_TURNS: Final = 3

#: Fresh lookups of one call, at most: each sends what failed to a replica that was not tried.
ROUNDS_MAX: Final = 8

#: Questions of one round, at most, about blocks of which nodes failed that are not the same for all.
QUESTIONS_MAX: Final = 4

#: Statuses after which another replica, or the block's new home, may still serve: by value. Not PENDING: a transfer may
#: still write where another one would.
_OPEN: Final = np.zeros(256, bool)
_OPEN[[_UNKNOWN, _EVICTED, _READ_ERROR, _NO_ROOM, _NODE_LOST]] = True
_OPEN[[int(BlockStatus.CORRUPT), int(BlockStatus.LEASE_LOST), int(BlockStatus.LATE)]] = True
#: Statuses of a node's answer that the master is told, by value. Not NO_ROOM: it may be had in the next turn. Not
#: LATE: there is no time left to tell it.
_REPORTED: Final = np.zeros(256, bool)
_REPORTED[[_EVICTED, _READ_ERROR]] = True
_REPORTED[[int(BlockStatus.CORRUPT), int(BlockStatus.LEASE_LOST), _NODE_LOST]] = True


#: Reads the asked blocks at ``where`` (None: all) from one node.
Attempt = Callable[[Peer, Where | None, bytes], Fetched]


@dataclass(slots=True)
class _Work:
    """A call under way: ``status`` and ``tier`` u8[count]. ``tried``: what each node was asked for and did not give,
    bool[count]. ``tries``: nodes that fresh lookups named and that were asked, u8[count]. ``over``: blocks that are
    not asked for any more, because nobody else has them or may give them, bool[count]."""

    asked: Asked
    attempt: Attempt
    status: npt.NDArray[np.uint8]
    tier: npt.NDArray[np.uint8]
    tries: npt.NDArray[np.uint8]
    over: Mask
    moved: int = 0
    pending: list[Landing] = field(default_factory=list)  #: what was given up and may still write
    tried: dict[Endpoint, Mask] = field(default_factory=dict)
    fresh: bool = False  #: what is being tried was looked up in this call

    @classmethod
    def new(cls, asked: Asked, attempt: Attempt, over: Mask | None) -> _Work:
        status, tries = np.zeros(asked.count, np.uint8), np.zeros(asked.count, np.uint8)
        over = np.zeros(asked.count, bool) if over is None else over
        return cls(asked, attempt, status, np.full(asked.count, NO_TIER, np.uint8), tries, over)

    def open(self) -> Mask:
        """Blocks that somebody who was not asked may still have."""
        still: Mask = _OPEN[self.status] & ~self.over
        return still

    def fill(self, where: Where | None, fetched: Fetched, status: npt.NDArray[np.uint8]) -> None:
        at = slice(None) if where is None else where
        self.pending.extend(fetched.pending)
        self.status[at] = status
        self.tier[at] = np.where(status == _LOADED, fetched.tier, NO_TIER)

    def note(self, node: Endpoint, where: Where | None, failed: Mask) -> None:
        """``node`` was asked for the blocks at ``where``, and did not give those that ``failed``."""
        tried = self.tried.setdefault(node, np.zeros(len(self.status), bool))
        at = slice(None) if where is None else where
        tried[at] |= failed

    def untried(self, positions: Positions, codes: U16, nodes: tuple[Endpoint, ...]) -> Positions:
        """Those of ``positions`` for which ``codes`` name a node that has not failed them yet."""
        left = codes[positions] != 0
        for index, node in enumerate(nodes):
            tried = self.tried.get(node)
            if tried is not None:
                left &= ~(tried[positions] & ((codes[positions] - np.uint16(1)) >> 2 == index))
        rest: Positions = positions[left]
        return rest

    def by_failed(self, positions: Positions) -> list[tuple[list[Endpoint], Positions]]:
        """``positions`` by the nodes that failed them; the most blocks first."""
        nodes = list(self.tried)
        failed = np.array([self.tried[node][positions] for node in nodes], bool).reshape(len(nodes), len(positions))
        kinds, which = np.unique(failed, axis=1, return_inverse=True)
        groups = [
            ([node for node, is_one in zip(nodes, kinds[:, kind], strict=True) if is_one], positions[which == kind])
            for kind in range(kinds.shape[1])
        ]
        return sorted(groups, key=lambda group: -len(group[1]))


class Reader:
    """Thread-safe: all state of a call is in its own :class:`_Work`."""

    def __init__(self, directory: Directory, peers: Peers, recent: RecentLocations, fanout: Fanout) -> None:
        self._directory = directory
        self._peers = peers
        self._recent = recent
        self._fanout = fanout

    def read(self, asked: Asked, attempt: Attempt, over: Mask | None = None) -> Fetched:
        """Try every block where it was believed to be; then, while time is left, at each replica that a fresh
        lookup names, once. ``over``: bool[count], blocks that are not tried again; the attempt may add to it.

        Raises only refusals of the whole call, and those only when nothing of it is ``pending``: else what they left
        undecided is REFUSED. Every position of ``status`` is decided.
        """
        hint = self._recent.find(asked.namespace, asked.salt, asked.hashes, epoch=asked.namespace.epoch)
        peer = self._peers.sole_local() if hint is None else self._only_peer(hint)
        asked.pace(others=hint is not None and hint.replicas > 1)
        first: Callable[[], None] | None
        if peer is not None and asked.count <= asked.limit:
            fetched = _guarded(attempt, peer, None, asked.hashes, asked.count)
            if fetched.status.tobytes().count(_LOADED) == asked.count:
                return fetched  # the good case: one node, nothing missing, no arrays of our own
            work = _Work.new(asked, attempt, over)
            work.moved = fetched.bytes_moved
            first = partial(self._settle, work, peer.endpoint, None, asked.hashes, fetched, guessed=hint is None)
        else:
            work = _Work.new(asked, attempt, over)
            first = partial(self._round, work, hint.codes, hint.nodes, None) if hint is not None else None
        try:
            if first is not None:
                first()
            self._read_on(work)
        except Exception as error:
            if not work.pending:
                raise
            refused_late("read", error)
            work.status[work.status == _UNKNOWN] = BlockStatus.REFUSED
        return Fetched(work.status, work.tier, 0, work.moved, tuple(work.pending))

    def _read_on(self, work: _Work) -> None:
        """Try what is open where fresh lookups say, while time is left."""
        asked = work.asked
        rounds, left = 0, 1
        while left and rounds < ROUNDS_MAX:
            positions = np.flatnonzero(work.open())
            if not len(positions) or (rounds and time.monotonic() > asked.deadline):
                break
            rounds += 1
            left = self._afresh(work, positions)

    def _only_peer(self, hint: Hint) -> Peer | None:
        """The one node that holds all in memory, when there is one and it can be reached."""
        codes = hint.codes
        code = int(codes[0])
        if not code or (len(codes) > 1 and not (codes == code).all()) or (code - 1) & 3 == _SSD:
            return None
        return self._peers.get(hint.nodes[(code - 1) >> 2])

    def _afresh(self, work: _Work, positions: Positions) -> int:
        """Look the call's blocks up and try ``positions`` where they are now, but at no node twice.

        Returns how many of the blocks that failed again may have more replicas.
        """
        asked, status = work.asked, work.status
        avoid = self._peers.avoiding(work.tried)
        try:
            located = self._directory.lookup(asked.namespace, asked.salt, asked.hashes, asked.deadline, avoid=avoid)
        except WHOLE_CALL:
            raise
        except KVError as error:
            status[status == _UNKNOWN] = unanswered(error)
            return 0
        codes, nodes = self._elsewhere(work, positions, located, avoid)
        self._recent.remember(
            asked.namespace,
            asked.salt,
            asked.hashes,
            codes,
            nodes,
            epoch=asked.namespace.epoch,
            replicas=located.replicas,
        )
        absent = BlockStatus.NOT_YET if located.not_yet else BlockStatus.MISSING
        status[(status == _UNKNOWN) & (located.codes == 0)] = absent
        untried = work.untried(positions, codes, nodes)
        if len(untried):
            work.fresh = True
            work.tries[untried] += 1
            asked.pace(others=located.replicas > len(work.tried) + 1)
            self._round(work, codes, nodes, untried)
        return int(np.count_nonzero(work.open() & (work.tries < located.replicas)))

    def _elsewhere(
        self, work: _Work, positions: Positions, located: Located, avoid: Sequence[Endpoint]
    ) -> tuple[U16, tuple[Endpoint, ...]]:
        """``located``, with another replica of each block for which it names a node that failed it, if there is one.

        All replicas of such a block were to be avoided, those on nodes that failed only other blocks too. So it is
        asked for again by itself, to avoid no more than what failed it; what is named then is all there is.
        """
        asked, where = work.asked, Hint(located.codes, located.nodes)
        failed = np.setdiff1d(positions, work.untried(positions, *where[:2]))
        absent = located.codes[failed] == 0
        work.over[failed[absent]] = True
        questions = 0
        for nodes, mine in work.by_failed(failed[~absent]) if len(work.tried) else ():
            if located.replicas != 1 and not set(nodes).issuperset(avoid):
                questions += 1
                if questions > QUESTIONS_MAX or time.monotonic() > asked.deadline:
                    break  # the others' turn is in the next round
                hashes = gather(asked.hashes, asked.namespace.hash_bytes, mine)
                try:
                    other = self._directory.lookup(asked.namespace, asked.salt, hashes, asked.deadline, avoid=nodes)
                except WHOLE_CALL:
                    raise
                except KVError as error:
                    log.debug("no other replica found", blocks=len(mine), reason=f"{type(error).__name__}: {error}")
                    break
                codes = np.zeros_like(where.codes)
                codes[mine] = other.codes
                where = chosen(where, Hint(codes, other.nodes), codes != 0)
            work.over[np.setdiff1d(mine, work.untried(mine, *where[:2]))] = True
        return where.codes, where.nodes

    def _round(self, work: _Work, codes: U16, nodes: tuple[Endpoint, ...], positions: Positions | None) -> None:
        groups = by_node(codes, positions, work.asked.limit)
        on_ssd = ((codes - np.uint16(1)) & 3) == _SSD  # an absent block's 0 becomes tier 3: nobody's
        serve = partial(self._serve, work, on_ssd if on_ssd.any() else None)
        work.moved += sum(self._fanout.run([partial(serve, nodes[g[0].node], g) for g in groups]))

    def _serve(self, work: _Work, on_ssd: Mask | None, node: Endpoint, parts: list[Part]) -> int:
        """All parts of one node, one after the other; returns the bytes moved.

        What is on SSD (bool[count]) is asked for in advance and fetched last, in pieces, so that the node reads
        the next piece while one is copied.
        """
        peer = self._peers.get(node)
        if peer is None or on_ssd is None:
            return self._fetch_all(work, node, peer, parts, None)
        block_bytes = work.asked.namespace.block_bytes
        piece, last = max(1, PIECE_BYTES // block_bytes), max(1, LAST_PIECE_BYTES // block_bytes)
        parts = memory_first(parts, on_ssd, piece, last)
        mine = np.concatenate([positions_of(part.where) for part in parts])
        ahead = ReadAhead(work.asked, peer, mine)
        moved = self._fetch_all(work, node, peer, parts, ahead)
        for _ in range(ROOM_TURNS):
            # Memory was short of room for a whole piece: for what has come it is free again.
            mine = mine[work.status[mine] == _NO_ROOM]
            piece = max(1, min(piece, len(mine)) // 4)
            if not len(mine) or time.monotonic() > work.asked.attempt_deadline:
                break
            moved += self._fetch_all(work, node, peer, list(pieces_of_node(parts[0].node, mine, piece)), None)
        if len(mine := mine[work.status[mine] == _NO_ROOM]):
            hashes = gather(work.asked.hashes, work.asked.namespace.hash_bytes, mine)
            self._report(work.asked, node, hashes, np.arange(len(mine)), 0, BlockStatus.NO_ROOM)
        read = ahead.from_ssd
        work.tier[read[work.status[read] == _LOADED]] = _SSD
        return moved

    def _fetch_all(
        self, work: _Work, node: Endpoint, peer: Peer | None, parts: Sequence[Part], ahead: ReadAhead | None
    ) -> int:
        asked, moved = work.asked, 0
        for part in parts:
            if ahead is not None:
                ahead.before(part)
            hashes = gather(asked.hashes, asked.namespace.hash_bytes, part.where)
            if peer is None:
                fetched = _nothing(len(hashes) // asked.namespace.hash_bytes, BlockStatus.NODE_LOST)
            else:
                fetched = _guarded(work.attempt, peer, part.where, hashes, len(hashes) // asked.namespace.hash_bytes)
            self._settle(work, node, part.where, hashes, fetched, guessed=False)
            moved += fetched.bytes_moved
        return moved

    def _settle(
        self, work: _Work, node: Endpoint, where: Where | None, hashes: bytes, fetched: Fetched, *, guessed: bool
    ) -> None:
        """Enter what a node answered. A miss where the directory had named it is EVICTED; where it was only
        guessed the block may be elsewhere. What was not had is reported, with what it ended in."""
        status = fetched.status
        failed = status != _LOADED
        missed = (status == _MISSING) | (status == _EVICTED)
        if missed.any():
            status = np.where(missed, np.uint8(_UNKNOWN if guessed else _EVICTED), status)
        work.fill(where, fetched, status)  # first: whatever is raised from here on, what is pending is known
        if not guessed:
            # What has moved since it was located may have come back to where it was.
            failed = failed if work.fresh else failed & ~missed
            if failed.any():
                work.note(node, where, failed)
            for code in np.unique(status[_REPORTED[status]]).tolist():
                at = np.flatnonzero(status == code)
                self._report(work.asked, node, hashes, at, fetched.delta_seq, BlockStatus(code))
        if ((status == _NODE_LOST) | (status == _PENDING)).any():
            self._peers.lose(node)

    def _report(
        self, asked: Asked, node: Endpoint, hashes: bytes, missed: Positions, delta_seq: int, status: BlockStatus
    ) -> None:
        gone = gather(hashes, asked.namespace.hash_bytes, missed)
        self._directory.report_miss(asked.namespace, asked.salt, gone, node, delta_seq, asked.deadline, status=status)


def _guarded(attempt: Attempt, peer: Peer, where: Where | None, hashes: bytes, count: int) -> Fetched:
    """One attempt; what is not a refusal of the whole call becomes the blocks' status."""
    try:
        return attempt(peer, where, hashes)
    except WHOLE_CALL:
        raise
    except KVError as error:
        log.warning("read failed", node=peer.endpoint.node_id, reason=f"{type(error).__name__}: {error}")
        return _nothing(count, status_of(error))


def _nothing(count: int, status: BlockStatus) -> Fetched:
    return Fetched(np.full(count, status, np.uint8), np.full(count, NO_TIER, np.uint8))

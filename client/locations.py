"""Where blocks are: answers of the directory decoded to arrays, and the few most recent ones kept.

A location code is u16: 0 absent, else 1 + 4 * index into ``nodes`` + tier. No Python object a block.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvstrata.client.results import NO_TIER, Mask
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ProtocolError
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.base import Endpoint

U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]
S = TypeVar("S", bound=np.generic)

#: No answer to a placement stands for longer, whatever a master says.
STANDS_MAX_S: Final = 2.0
NODES_MAX: Final = ((1 << 16) - 1) // 4
#: Tenants whose last answers are kept, and answers for each.
TENANTS_MAX: Final = 64
ANSWERS_MAX: Final = 4


class Located(msgspec.Struct, frozen=True):
    """A lookup's answer. ``codes`` u16[n] for the asked shard; ``present`` bool[n] after the AND over shards.
    ``replicas``: how many nodes have the block that most nodes have; 0 when the master does not say."""

    codes: U16
    nodes: tuple[Endpoint, ...]
    present: Mask
    hit_blocks: int
    shard_hit_blocks: int
    not_yet: bool = False
    replicas: int = 0
    code: int | None = None  #: that of all blocks, where it is known that they have the same

    def __len__(self) -> int:
        return len(self.codes)

    def tiers(self) -> U8:
        """u8[n]; ``NO_TIER`` where absent."""
        if self.code is not None:
            return filled(len(self.codes), (self.code - 1) & 3 if self.code else NO_TIER, np.uint8)
        return np.where(self.codes == 0, NO_TIER, (self.codes - 1) & 3).astype(np.uint8)


class Placed(msgspec.Struct, frozen=True):
    """A placement's answer: ``codes`` u16[n] (0 = nowhere), ``states`` u8[n] (:class:`PlaceState`).

    ``code`` and ``state``: those of all blocks, where it is known that they have the same; else None. ``stands_s``: for
    so long the one node of ``nodes`` may be sent more of the tenant's blocks without asking.
    """

    codes: U16
    states: U8
    nodes: tuple[Endpoint, ...]
    code: int | None = None
    state: int | None = None
    stands_s: float = 0.0


class Hint(NamedTuple):
    """Where blocks were: ``codes`` u16[n] into ``nodes``; ``replicas`` as in :class:`Located`."""

    codes: U16
    nodes: tuple[Endpoint, ...]
    replicas: int = 0


# -------------------------------------------------------------------- decoding


def decode_lookup(reply: pb.LookupOk, count: int) -> Located:
    """Arrays of a lookup's answer for ``count`` blocks; raises :class:`ProtocolError` when it does not add up."""
    nodes = _endpoints(reply.nodes)
    code = _only_code(reply.run_code, reply.run_length, count)
    if code is not None:
        codes = filled(count, code, np.uint16)
    else:
        codes = _expand(_array(reply.run_code, np.uint16), _array(reply.run_length, np.uint32), count)
    _check_codes(code if code is not None else int(codes.max(initial=0)), nodes)
    bits = reply.present
    if bits:
        if len(bits) * 8 < count:
            raise ProtocolError(f"a presence mask of {len(bits)} bytes for {count} blocks")
        present = np.unpackbits(np.frombuffer(bits, np.uint8), count=count, bitorder="little").view(bool)
    else:
        present = codes != 0 if code is None else filled(count, code != 0, np.bool_)
    hit_blocks, shard_hit_blocks = reply.hit_blocks, reply.shard_hit_blocks
    if hit_blocks > count or shard_hit_blocks > count:
        raise ProtocolError(f"a hit of {max(hit_blocks, shard_hit_blocks)} blocks of {count}")
    return Located(codes, nodes, present, hit_blocks, shard_hit_blocks, reply.not_yet, reply.replicas, code)


def decode_place(reply: pb.PlaceOk, count: int) -> Placed:
    """Arrays of a placement's answer for ``count`` blocks; raises like :func:`decode_lookup`."""
    nodes = _endpoints(reply.nodes)
    code, states = _only_code(reply.run_code, reply.run_length, count), reply.run_state
    stands_s = min(reply.stands_ms / 1e3, STANDS_MAX_S) if len(nodes) == 1 else 0.0
    if code is not None and len(states) == 1:
        _check_codes(code, nodes)
        state = states[0]
        return Placed(filled(count, code, np.uint16), filled(count, state, np.uint8), nodes, code, state, stands_s)
    lengths = _array(reply.run_length, np.uint32)
    codes = _expand(_array(reply.run_code, np.uint16), lengths, count)
    _check_codes(int(codes.max(initial=0)), nodes)
    return Placed(codes, _expand(_array(states, np.uint8), lengths, count), nodes, stands_s=stands_s)


def join_located(parts: Sequence[Located]) -> Located:
    """The answers for consecutive pieces of one call, as one."""
    if len(parts) == 1:
        return parts[0]
    codes, nodes = _join_codes([(part.codes, part.nodes) for part in parts])
    present = np.concatenate([part.present for part in parts])
    hit = _join_hits((part.hit_blocks, len(part)) for part in parts)
    shard_hit = _join_hits((part.shard_hit_blocks, len(part)) for part in parts)
    replicas = max(part.replicas for part in parts)
    return Located(codes, nodes, present, hit, shard_hit, any(part.not_yet for part in parts), replicas)


def join_placed(parts: Sequence[Placed]) -> Placed:
    if len(parts) == 1:
        return parts[0]
    codes, nodes = _join_codes([(part.codes, part.nodes) for part in parts])
    return Placed(codes, np.concatenate([part.states for part in parts]), nodes)


def _array(data: bytes, kind: type[np.generic]) -> npt.NDArray[np.unsignedinteger]:
    size = np.dtype(kind).itemsize
    if len(data) % size:
        raise ProtocolError(f"{len(data)} bytes are no array of {size}-byte elements")
    return np.frombuffer(data, kind)


def _expand(
    values: npt.NDArray[np.unsignedinteger], lengths: npt.NDArray[np.unsignedinteger], count: int
) -> npt.NDArray[np.unsignedinteger]:
    """Run-length decode; the lengths are checked before anything of their size is made."""
    if len(values) != len(lengths) or int(lengths.sum(dtype=np.uint64)) != count:
        raise ProtocolError(f"{len(values)} runs with lengths {lengths[:8].tolist()}... for {count} blocks")
    return np.repeat(values, lengths)


def _only_code(run_code: bytes, run_length: bytes, count: int) -> int | None:
    """The code of all ``count`` blocks where the answer is one run of them, which it most often is; else None."""
    if len(run_code) != 2 or len(run_length) != 4 or int.from_bytes(run_length, "little") != count:
        return None
    return int.from_bytes(run_code, "little")


def filled(count: int, value: int, kind: type[S]) -> npt.NDArray[S]:
    """``np.full`` in a fraction of its time: most calls are of few blocks."""
    array = np.empty(count, kind)
    array.fill(value)
    return array


def _check_codes(greatest: int, nodes: Sequence[Endpoint]) -> None:
    if greatest > 4 * len(nodes):
        raise ProtocolError(f"location code {greatest} names none of the {len(nodes)} nodes")


def _endpoints(nodes: Iterable[pb.NodeRef]) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(node.node_id, node.incarnation, node.channel, node.unix_path, node.boot_id) for node in nodes)


def _join_codes(parts: Sequence[tuple[U16, tuple[Endpoint, ...]]]) -> tuple[U16, tuple[Endpoint, ...]]:
    index: dict[Endpoint, int] = {}
    out = []
    for codes, nodes in parts:
        lut = np.zeros(1 + 4 * len(nodes), np.uint16)
        for old, endpoint in enumerate(nodes):
            new = index.setdefault(endpoint, len(index))
            if new >= NODES_MAX:
                raise ProtocolError(f"one answer names more than {NODES_MAX} nodes")
            lut[1 + 4 * old : 5 + 4 * old] = np.arange(1 + 4 * new, 5 + 4 * new)
        out.append(lut[codes])
    return np.concatenate(out), tuple(index)


def chosen(first: Hint, second: Hint, take_second: Mask) -> Hint:
    """The codes of ``second`` where ``take_second`` (bool[n]), of ``first`` elsewhere."""
    codes, nodes = _join_codes([first[:2], second[:2]])
    count = len(first.codes)
    return Hint(np.where(take_second, codes[count:], codes[:count]).astype(np.uint16), nodes)


def _join_hits(parts: Iterable[tuple[int, int]]) -> int:
    total = 0
    for hit, length in parts:
        total += hit
        if hit < length:
            break
    return total


# -------------------------------------------------------------------- memory


#: For so long a store may be news to the directory.
NEWS_S: Final = 0.25


class _Answer(NamedTuple):
    """Where ``packed`` is; until ``news_until`` (monotonic seconds) this client knows better than a lookup."""

    packed: bytes
    hint: Hint
    news_until: float


class RecentLocations:
    """Where the last few answers of each tenant said blocks are, for the load that follows. Bounded.

    Remembered locations are hints: what has moved since costs one miss and a fresh lookup. Thread-safe:
    what hangs in the table is never changed, only replaced.
    """

    def __init__(
        self,
        tenants_max: int = TENANTS_MAX,
        answers_max: int = ANSWERS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenants_max = tenants_max
        self._answers_max = answers_max
        self._clock = clock
        self._tenants: OrderedDict[tuple[Namespace, str, int], list[_Answer]] = OrderedDict()
        self._lock = threading.Lock()

    def remember(
        self,
        namespace: Namespace,
        salt: str,
        packed: bytes,
        codes: U16,
        nodes: tuple[Endpoint, ...],
        *,
        epoch: int = 0,
        stored: bool = False,
        replicas: int = 0,
    ) -> None:
        """Keep an answer in front of older ones; one for the same hashes is replaced.

        ``epoch``: the weight epoch it was asked under; handles pinned to another one never see it.
        ``stored``: it is where this client has just stored the blocks. For a moment the directory may not
        have heard of them, so a lookup that shows them absent does not take the place of that knowledge.
        """
        key, now = (namespace, salt, epoch), self._clock()
        with self._lock:
            known = self._tenants.pop(key, [])
            hint = Hint(codes, nodes, replicas)
            if not stored and not (codes.item() if len(codes) == 1 else codes.all()):
                hint = _with_own_stores(hint, packed, [a for a in known if a.news_until > now], namespace.hash_bytes)
            kept = [a for a in known if a.packed != packed or (not stored and a.news_until > now)]
            answer = _Answer(packed, hint, now + NEWS_S if stored else 0.0)
            self._tenants[key] = [answer, *kept[: self._answers_max - 1]]
            if len(self._tenants) > self._tenants_max:
                self._tenants.popitem(last=False)

    def forget(self, namespace: Namespace, salt: str, *, epoch: int = 0) -> None:
        with self._lock:
            self._tenants.pop((namespace, salt, epoch), None)

    def find(self, namespace: Namespace, salt: str, packed: bytes, *, epoch: int = 0) -> Hint | None:
        """What the newest answer says that holds ``packed`` as a contiguous run, cut to it; else None."""
        answers = self._tenants.get((namespace, salt, epoch))
        if answers is None:
            return None
        for known, hint, _ in answers:
            if known == packed:
                return hint
            if len(known) > len(packed):
                start = _run_in(known, packed, namespace.hash_bytes)
                if start >= 0:
                    return hint._replace(codes=hint.codes[start : start + len(packed) // namespace.hash_bytes])
        return None


def _with_own_stores(hint: Hint, packed: bytes, stores: Sequence[_Answer], hash_bytes: int) -> Hint:
    """``hint`` for ``packed``, its absent blocks filled in from what this client has just stored."""
    codes, nodes, replicas = hint
    for stored in stores:
        inner, outer = sorted((packed, stored.packed), key=len)
        start = 0 if inner == outer else _run_in(outer, inner, hash_bytes)
        if start < 0 or not inner:
            continue
        count = len(inner) // hash_bytes
        theirs = slice(start, start + count) if outer is stored.packed else slice(0, count)
        ours = slice(start, start + count) if outer is packed else slice(0, count)
        both, nodes = _join_codes([(codes, nodes), (stored.hint.codes[theirs], stored.hint.nodes)])
        codes = both[: len(codes)].copy()
        codes[ours] = np.where(codes[ours] == 0, both[len(codes) :], codes[ours])
    return Hint(codes, nodes, replicas)


def _run_in(known: bytes, packed: bytes, hash_bytes: int) -> int:
    """Index of the hash in ``known`` at which the run ``packed`` starts, or -1."""
    first = np.frombuffer(packed, np.uint64, 1)[0]
    words = np.ndarray((len(known) // hash_bytes,), np.uint64, known, 0, (hash_bytes,))
    for start in np.flatnonzero(words == first).tolist():
        if known.startswith(packed, start * hash_bytes):
            return int(start)
    return -1

"""What moves bytes between one client and one node: the transport seam.

A :class:`Transport` connects to nodes; a :class:`Peer` is one node as one client reaches it. A peer
does a whole read (acquire, move, check the lease, give it back) or a whole write (reserve, move,
commit) for many blocks at once, because how the two halves interleave is what differs between
transports: over ``tcp`` the bytes ride on the control messages, over ``shm`` they never leave memory.

Results are arrays of :class:`BlockStatus`. A peer raises only what a whole call can be refused for;
an unreachable or silent node is ``NODE_LOST``, a passed deadline ``LATE``, in every undecided position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.ma  # np.unique does when it is first called: 15 ms and a full garbage collection, of somebody's first call
import numpy.typing as npt

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import HintKind
from kvstrata.transfer.regions import BlockView, Region

StatusArray = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Verify = Literal["always", "sample", "never"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach one node. ``unix_path`` counts only when ``boot_id`` is this machine's."""

    node_id: str
    incarnation: int
    channel: str
    unix_path: str = ""
    boot_id: str = ""


class Landing(Protocol):
    """A one-sided transfer that its call could not wait for: its memory is in use until it has settled."""

    def settled(self) -> bool:
        """True once no byte can move any more."""

    def wait(self, deadline: float) -> bool:
        """Wait until then, or until ``deadline`` (monotonic seconds); :meth:`settled`."""


class Fetch(msgspec.Struct, frozen=True):
    """A read: block i of ``blocks`` receives the block whose hash is the i-th of ``hashes``.

    ``hashes`` is packed, n * hash_bytes. ``deadline`` is in monotonic seconds. ``epoch``: the weight epoch of
    the reader's namespace handle; a node at another one has nothing for it.

    ``parts``: ends of byte ranges of a block, ascending, the last is ``block_bytes`` (a range: the pages of a group of
    layers). ``landed(k, loaded)`` is called in order of k, from any one thread, when range k of every block that
    ``loaded`` (bool[n]) names is in place under a lease that stands; at the latest before the call returns. Checksums
    are of whole blocks, so the call's own answer may still take a block back.
    """

    namespace: Namespace
    salt: str
    hashes: bytes
    blocks: BlockView
    deadline: float
    verify: Verify = "sample"
    epoch: int = 0
    parts: tuple[int, ...] = ()
    landed: Callable[[int, Mask], None] | None = None


class Fetched(msgspec.Struct, frozen=True):
    """``status``, ``tier``: u8[n]; ``tier`` is where a loaded block was when the node was asked. ``delta_seq``
    goes into a miss report. Unloaded rows may hold garbage; those that are PENDING may still be written to until all
    of ``pending`` have settled."""

    status: StatusArray
    tier: npt.NDArray[np.uint8]
    delta_seq: int = 0
    bytes_moved: int = 0
    pending: tuple[Landing, ...] = ()
    by_index: int = 0  #: of the loaded blocks, those for which the node was not asked


class Push(msgspec.Struct, frozen=True):
    """A write. ``parent`` is the hash before the first (empty at a chain's head), ``first_index`` the
    first block's position in its chain, ``epoch`` the weight epoch of the writer's namespace handle.

    ``parts``: ends of byte ranges of a block, as :attr:`Fetch.parts`. ``written(k, deadline)`` waits until range k of
    every block is in memory, for as long as it likes and no longer than ``deadline`` (monotonic seconds), and is asked
    in any order, from any threads; nothing of a range is read before. False: it will not be, or not in time, and
    nothing is stored.
    """

    namespace: Namespace
    salt: str
    hashes: bytes
    blocks: BlockView
    deadline: float
    parent: bytes = b""
    first_index: int = 0
    epoch: int = 0
    parts: tuple[int, ...] = ()
    written: Callable[[int, float], bool] | None = None


class Pushed(msgspec.Struct, frozen=True):
    """``status``: u8[n]; ``durable``: bool[n], True where the node has the block flushed on SSD, None: nowhere.
    What is read after the call has returned is never stored: over rdma a node that was late may still read blocks
    that are LATE or NODE_LOST, so their memory stays mapped until it says that it does not (unregistering asks it).
    Blocks that are PENDING must not be reused until all of ``pending`` have settled."""

    status: StatusArray
    bytes_moved: int = 0
    durable: Mask | None = None
    pending: tuple[Landing, ...] = ()


class Named(msgspec.Struct, frozen=True):
    """Blocks by name, for calls that move no bytes to or from this process."""

    namespace: Namespace
    salt: str
    hashes: bytes
    deadline: float
    epoch: int = 0


class Lease(Protocol):
    """A held read lease on mapped blocks: ``arrays[i]`` is a read-only u8[block_bytes], or None.

    The arrays are good until ``close()``; the library renews the lease until then, up to its age cap.
    ``valid()`` is False once the node no longer honours it.
    """

    arrays: Sequence[npt.NDArray[np.uint8] | None]

    def valid(self) -> bool: ...
    def close(self) -> None: ...


class Peer(Protocol):
    """One node, as one client reaches it. Calls come from any thread."""

    endpoint: Endpoint

    @property
    def transport(self) -> str:
        """What bytes take now."""

    def fetch(self, request: Fetch) -> Fetched: ...
    def push(self, request: Push) -> Pushed: ...
    def view(self, namespace: Namespace, salt: str, hashes: bytes, deadline: float, epoch: int = 0) -> Lease: ...

    def prefetch(self, blocks: Named) -> StatusArray:
        """Begin to read blocks that are on SSD only into memory, and mark all as used; answers at once.

        u8[n]: LOADED in memory, IN_FLIGHT being read, MISSING, or why not. Raises :class:`KVError`.
        """

    def hint(self, blocks: Named, kind: HintKind, ttl_s: float) -> int:
        """Tell what is known of the blocks' future; how many the node moved for it. Raises :class:`KVError`."""

    def reachable(self) -> bool:
        """False while the breaker is open."""

    def upkeep(self) -> None:
        """Called now and then by the owner: gives back leases, renews views, probes an open breaker."""

    def close(self) -> None: ...


@runtime_checkable
class ReachesMemory(Protocol):
    """What a peer is beside, when its ``fetch`` and ``push`` may name device memory; without it that is staged.

    For device memory they raise :class:`Unavailable` when the way to it was lost before anything was moved or told of.
    """

    def reaches_memory(self, region: Region) -> bool:
        """Whether bytes can move straight between the node and ``region`` now. Quick."""


class Transport(Protocol):
    """A way to move bytes. ``reaches`` says whether it can serve an endpoint from here."""

    name: str

    def reaches(self, endpoint: Endpoint) -> bool: ...
    def connect(self, endpoint: Endpoint) -> Peer: ...
    def register(self, region: Region) -> None: ...
    def unregister(self, region: Region) -> None: ...
    def close(self) -> None: ...

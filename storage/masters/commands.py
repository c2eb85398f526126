"""What masters order, carried out: at once in memory, then in files and on devices, then confirmed.

The memory part runs in the caller's thread, under the node's lock, so that a link goes on listening while a
disk works. The rest is done in turn by one loop of the node, many orders at a time: shares and weight epochs
are written to their file, removals recorded on the devices, reads that were under way waited for. An order
that could not be made to last is confirmed with the error, and its master keeps it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import InvalidArgument, KVError
from kvstrata.proto.keys import Namespace, check_salt
from kvstrata.proto.limits import limits_of
from kvstrata.proto.logs import get_logger
from kvstrata.storage.eviction.quotas import NodeShare, share_problem
from kvstrata.storage.masters.fence import Fence
from kvstrata.storage.masters.policies import Policies, PolicyFile
from kvstrata.storage.records import Lease, Shelf
from kvstrata.storage.ssd.base import Extent, Removal
from kvstrata.storage.state import NodeState, in_scope
from kvstrata.storage.tiers.eraser import Eraser

if TYPE_CHECKING:
    from kvstrata.storage.ssd.tenant_keys import TenantKeys

log = get_logger(__name__)

#: The loop comes round this often; a new order wakes it.
TURN_S: Final = 0.05
#: And so often while nothing waits: orders wake the loop.
REST_S: Final = 1.0
#: A turn that takes longer than this is a problem in health: a device is slow to flush.
TURN_BOUND_S: Final = 30.0
#: Orders that wait for their turn.
WAITING_MAX: Final = 4096
#: An order fails when nothing has come of it for this long: a file or a device that does not take it, reads of
#: what it took away that do not end.
ORDER_S: Final = 30.0
#: A file or a device that failed is tried again after this.
RETRY_S: Final = 1.0
#: Slots overwritten in one step.
ERASE_BLOCKS: Final = 256

Confirm = Callable[[control.CommandDone], None]


@dataclass(slots=True)
class _Order:
    """``reads`` were under way when it came: they may still send what it took away. ``kept``: it needs the file.

    ``erase`` are shelves whose slots are to be overwritten. ``shred``: a key is to be gone for good.
    """

    command: int
    confirm: Confirm
    deadline: float
    kept: bool = False
    removal: Removal | None = None
    reads: list[Lease] = field(default_factory=list)
    erase: list[Shelf] = field(default_factory=list)
    shred: bool = False
    left: int = 0


class Commands:
    """Over one node's state and its lock. ``file`` None: nothing outlives the process (tests).

    ``eraser`` is that of the node's SSDs, if it has some; ``keys`` are theirs, if they are encrypted.

    Methods other than :meth:`turn` may be called by any thread that does not hold the lock.
    """

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        file: PolicyFile | None = None,
        eraser: Eraser | None = None,
        keys: TenantKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kept_revision = state.quotas.revision  #: of the shares that hold and would survive a restart; 0: none yet
        self.wake: Callable[[], None] = lambda: None  #: runs a turn soon
        self.fence = Fence() if file is None else file.fence()
        self._state = state
        self._lock = lock
        self._file = file
        self._eraser = eraser
        self._keys = keys
        self._clock = clock
        self._changes = 0
        self._kept = 0
        self._kept_epoch = self.fence.epoch  #: of the leader that a restart would remember
        self._retry_at = 0.0
        self._file_problem = ""
        self._shares_problem = ""
        self._fresh: deque[_Order] = deque()
        self._unkept: list[_Order] = []
        self._erase_at = 0.0
        self._ending: list[_Order] = []

    def problem(self) -> str:
        """Why what masters say is not kept, or an empty string."""
        return self._file_problem or self._shares_problem

    # ------------------------------------------------------------------ what masters say

    def obeys(self, epoch: int, leader_id: str) -> str:
        """Why what a master says as the leader of ``epoch`` is not obeyed; "" when it is. Kept over a restart."""
        with self._lock:
            before = self.fence.epoch
            refusal = self.fence.admit(epoch, leader_id)
            if self.fence.epoch != before:
                self._changes += 1
        if self.fence.epoch != before:
            log.info("a leader is obeyed", epoch=epoch, leader=leader_id)
            self.wake()
        return refusal

    def refused(self, order: str, why: str) -> None:
        """An order was not carried out: whoever gave it does not lead."""
        with self._lock:
            self.fence.refused += 1
        log.warning("an order was refused", order=order, reason=why)

    def heard(self) -> None:
        """Any message of the leader: shares stand for another time to live."""
        with self._lock:
            self._state.quotas.renewed(self._clock())

    def attached(self, message: control.AttachOk) -> None:
        """What a master says first. When this returns, the node works by it."""
        for epoch in message.epochs:
            self.advance(epoch, _nobody)
        if message.HasField("shares"):
            self.share(message.shares)

    def share(self, message: control.Shares) -> None:
        """Work by these shares. They are reported (``kept_revision``) once a restart would find them."""
        try:
            shares = [_share(share) for share in message.shares]
            fallback = _share(message.fallback) if message.HasField("fallback") else None
        except InvalidArgument as error:
            self._shares_problem = f"shares of revision {message.revision} were refused: {error}"
            log.error("shares refused", revision=message.revision, reason=str(error))
            return
        with self._lock:
            self._state.quotas.apply(
                shares, message.forgotten, message.whole, fallback, message.ttl_ms / 1e3, self._clock(),
                revision=message.revision,
            )  # fmt: skip
            self._changes += 1
            self.kept_revision = 0
        self._shares_problem = ""
        self.wake()

    def orphaned(self, message: control.Orphaned) -> None:
        """Blocks that may leave first. Nobody waits for it, and one that makes no sense is passed over."""
        try:
            namespace = Namespace.from_spec(message.spec)
            with self._lock:
                self._state.orphaned(namespace, message.salt, message.hashes, message.epoch, self._clock())
        except InvalidArgument as error:
            log.warning("a master's hint was refused", reason=str(error))

    def advance(self, message: control.NamespaceEpoch, confirm: Confirm) -> None:
        """A group's weights are new. Confirmed once nobody can be sent a block of older ones, nor after a restart."""
        with self._lock:
            now = self._clock()
            known = self._state.known.epoch(message.group)
            self._state.set_epoch(message.group, message.epoch, now)
            if message.epoch > known:
                self._changes += 1
            elif not message.command:
                return
            removal = self._removal(group=message.group, epoch=self._state.known.epoch(message.group))
            order = _Order(message.command, confirm, now + ORDER_S, True, removal, self._state.leases.sending())
        self._take(order)

    def drop(self, message: control.DropCommand, confirm: Confirm) -> None:
        """Everything in a scope goes, also from the devices."""
        salt = None if message.any_salt else message.salt
        with self._lock:
            now = self._clock()
            erase = self._claim(message.group, salt) if message.erase else []
            shred = False
            if message.erase and not message.group and self._keys is not None:
                self._keys.retire(salt)  # with the drop: what comes after it has a new key
                shred = True
            self._state.drop(message.group, salt, now)
            removal = self._removal(group=message.group, salt=salt)
            reads = self._state.leases.sending()
            order = _Order(message.command, confirm, now + ORDER_S, False, removal, reads, erase, shred)
        self._take(order)

    def remove(self, message: control.RemoveCommand, confirm: Confirm) -> None:
        """Single blocks go, also from the devices."""
        try:
            namespace = Namespace.from_spec(message.spec)
            check_salt(message.salt)
            if len(message.hashes) % namespace.hash_bytes:
                raise InvalidArgument(f"{len(message.hashes)} bytes of hashes of {namespace.hash_bytes} each")
        except KVError as error:
            confirm(control.CommandDone(command=message.command, error=str(error)))
            return
        with self._lock:
            now = self._clock()
            self._state.remove(namespace, message.salt, message.hashes, now)
            removal = self._removal(namespace=namespace, salt=message.salt, hashes=message.hashes)
            order = _Order(message.command, confirm, now + ORDER_S, removal=removal)
        self._take(order)

    def _claim(self, group: str, salt: str | None) -> list[Shelf]:
        return self._eraser.claim(lambda shelf: in_scope(shelf, group, salt)) if self._eraser is not None else []

    def _removal(
        self,
        namespace: Namespace | None = None,
        hashes: bytes = b"",
        group: str = "",
        salt: str | None = None,
        epoch: int | None = None,
    ) -> Removal | None:
        """For the devices: everything they have been given so far, that matches."""
        if self._state.ssd is None:
            return None
        below = self._state.ssd.arena.generation
        return Removal(below, namespace, hashes, group, salt, epoch)

    def _take(self, order: _Order) -> None:
        if len(self._fresh) >= WAITING_MAX:
            _end(order, f"{WAITING_MAX} orders wait for this node's disks")
            return
        if self.fence.epoch != self._kept_epoch:
            order.kept = True  # whom it came from must not be forgotten either
        self._fresh.append(order)
        self.wake()

    # ------------------------------------------------------------------ in turn

    def turn(self) -> float | None:
        """Make what was ordered so far last, then confirm it. For one thread. Seconds to the next if nothing waits."""
        fresh = [self._fresh.popleft() for _ in range(len(self._fresh))]
        if self._clock() >= self._retry_at:
            fresh = [*self._unkept, *fresh]
            self._unkept = []
        unkept = self._keep(urgent=any(order.kept for order in fresh))
        unrecorded = self._record([order.removal for order in fresh if order.removal is not None])
        unshredded = self._shred() if any(order.shred for order in fresh) else ""
        if unkept or unrecorded or unshredded:
            self._retry_at = self._clock() + RETRY_S
        for order in fresh:
            error = (unkept if order.kept else "") or (unrecorded if order.removal is not None else "")
            error = error or (unshredded if order.shred else "")
            if not error:
                self._ending.append(order)
            elif self._clock() >= order.deadline:
                _end(order, error)
            else:
                self._unkept.append(order)
        self._erase()
        self._confirm_ended()
        waits = self._unkept or self._ending or self._changes != self._kept
        return None if waits or (self._eraser is not None and self._eraser.claimed) else REST_S

    def _keep(self, urgent: bool) -> str:
        """Write the file if there is news for it; why it could not be, or an empty string."""
        now = self._clock()
        with self._lock:
            changes, revision = self._changes, self._state.quotas.revision
            if changes == self._kept:
                return ""
            if not urgent and now < self._retry_at:
                return self._file_problem
            leader = self.fence.epoch, self.fence.leader_id
            policies = Policies(self._state.quotas.to_json(), dict(self._state.known.epochs), leader)
        if self._file is not None:
            try:
                self._file.save(policies)
            except OSError as error:
                problem = f"cannot write {self._file.path}: {error.strerror or error}"
                if problem != self._file_problem:
                    log.error("shares and weight epochs are not kept", reason=problem)
                self._file_problem = problem
                return problem
        self._file_problem = ""
        with self._lock:
            self._kept, self._kept_epoch = changes, leader[0]
            if changes == self._changes:
                self.kept_revision = revision
        return ""

    def _record(self, removals: list[Removal]) -> str:
        store = self._state.store
        if not removals or store is None or store.record(removals):
            return ""
        return "the node's devices did not record it: it may come back when the node restarts"

    def _shred(self) -> str:
        """Keep the keys without those that are to be gone; why that could not be, or an empty string."""
        assert self._keys is not None
        try:
            self._keys.save()
        except OSError as error:
            return f"a key is not destroyed: cannot write {self._keys.file}: {error.strerror or error}"
        return ""

    def _erase(self) -> None:
        """Overwrite what was dropped, for one turn's time; what has not been let go of yet comes later."""
        eraser, store, ssd = self._eraser, self._state.store, self._state.ssd
        if eraser is None or store is None or ssd is None or self._clock() < self._erase_at:
            return
        until = self._clock() + TURN_S
        while True:
            with self._lock:
                if len(eraser.kept) < ERASE_BLOCKS:
                    ssd.sweep(ERASE_BLOCKS)
                blocks = eraser.take(ERASE_BLOCKS)
            if not blocks:
                return
            erased = store.erase([(cast(Extent, block.slab), block.slot) for block in blocks])
            with self._lock:
                eraser.done(blocks, erased)
            if not erased:
                self._erase_at = self._clock() + RETRY_S
                return
            if self._clock() >= until:
                self.wake()
                return

    def _confirm_ended(self) -> None:
        """Confirm those of which nothing is left to be read or overwritten."""
        if not self._ending:
            return
        now = self._clock()
        with self._lock:
            standing = [sum(self._state.leases.stands(lease) for lease in order.reads) for order in self._ending]
            left = [self._eraser.left(order.erase) if self._eraser is not None else 0 for order in self._ending]
        waiting = []
        for order, reads, slots in zip(self._ending, standing, left, strict=True):
            if slots != order.left:
                order.left, order.deadline = slots, now + ORDER_S  # it goes on
            if not reads and not slots:
                _end(order, "")
            elif now < order.deadline:
                waiting.append(order)
            elif reads:
                _end(order, f"{reads} reads that began before are still being sent")
            else:
                _end(order, f"{slots} slots on SSD are not overwritten yet: the node goes on trying")
        self._ending = waiting


def shares_told(shares: Iterable[NodeShare]) -> list[control.Share]:
    """For the attach message."""
    return [control.Share(**dataclasses.asdict(share)) for share in shares]


def _share(share: control.Share) -> NodeShare:
    """Raises :class:`InvalidArgument` when it cannot be one."""
    taken = NodeShare(**limits_of(share))
    problem = share_problem(taken)
    if problem:
        raise InvalidArgument(problem)
    return taken


def _end(order: _Order, error: str) -> None:
    if error:
        log.warning("an order of a master failed", command=order.command, reason=error)
    if order.command:
        order.confirm(control.CommandDone(command=order.command, error=error))


def _nobody(done: control.CommandDone) -> None:
    """Nobody waits for it."""

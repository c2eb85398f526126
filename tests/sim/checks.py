"""What has to hold: after events, every half second of the story, and once all faults have ended."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstrata.master.client_calls import ClientCalls
from kvstrata.master.leadership.election import TURN_S
from kvstrata.master.liveness import NodeState as Liveness
from kvstrata.master.state import MasterState
from kvstrata.proto.folding import fold
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.storage.copying.draining import DrainState
from kvstrata.storage.leases import granted_seconds
from kvstrata.storage.records import VISIBLE, Block
from tests.sim.client_host import CALL_S
from tests.sim.clock import Steps
from tests.sim.node_host import NodeHost
from tests.sim.oracle import Key, Violation
from tests.sim.plan import GROUPS, SALTS, chain, namespace

if TYPE_CHECKING:
    from tests.sim.master_host import MasterHost
    from tests.sim.world import World

#: A host is checked after it has taken in so many messages; one host in its turn every other second.
NODE_EVERY, MASTER_EVERY = 16, 40
LOOK_S = 0.5
#: A block that moves is found where it is within this.
WORD_S = 1.0
#: Where blocks of another size were read last, and nobody gave those leases back, there is room once they end.
LEASED_S = granted_seconds(int(CALL_S * 1e3))
#: An order may take this long to arrive, with what its leader knew when it gave it.
ON_ITS_WAY_S = 10.0
#: Masters read what the leader saved within this.
READ_BY_OTHERS_S = 2 * TURN_S
#: A lowered limit leaves so much time to come down to it.
LOWER_S = 20.0
_LOADED, _STORED = int(BlockStatus.LOADED), int(BlockStatus.STORED)
#: Why a block that a node has may not come: its tenant has too little memory to read it into.
_NO_ROOM = frozenset({int(BlockStatus.NO_ROOM), int(BlockStatus.LATE)})


class Checks:
    def __init__(self, world: World) -> None:
        self._world = world
        self._looks = 0
        self._worked: Counter[str] = Counter()
        self._limits: dict[str, int | None] = {}
        self._limited_at: dict[str, float] = {}
        self._allowed: dict[str, float] = {}  #: by limited tenant
        self._seen: dict[Key, dict[str, float]] = defaultdict(dict)  #: when a node last had it
        self._let_go: dict[tuple[Key, str], float] = {}
        world.scheduler.every(LOOK_S, self.look)

    # ------------------------------------------------------------------ on the way

    def worked(self, host: NodeHost | MasterHost) -> None:
        """A host has taken something in."""
        count = self._worked[host.name] = self._worked[host.name] + 1
        if count % (NODE_EVERY if isinstance(host, NodeHost) else MASTER_EVERY) == 0 and host.up:
            host.check()

    def look(self) -> None:
        """All that is looked at from time to time, and after the faults half as often."""
        self._looks += 1
        if self._world.mended and self._looks % 2:
            return
        if self._looks % 4 < 2:
            hosts = [*self._world.nodes.values(), *self._world.masters.values()]
            host = hosts[self._looks // 4 % len(hosts)]  # time alone has changed it
            if host.up:
                host.check()
        self.truth()
        self.usage()

    def structures(self) -> None:
        """The ``check()`` of every state machine."""
        for host in (*self._world.nodes.values(), *self._world.masters.values()):
            if host.up:
                host.check()

    def truth(self) -> None:
        """Every visible block of every node holds the bytes of a committed write that was not taken away."""
        for node in self._world.nodes.values():
            for key, block in visible(node, 0):
                self._judge(node, key, bytes(block.bytes()), block, "memory")
                self._seen[key][node.name] = self._world.now
            for key, block in visible(node, 1):
                kept = node.disk.slots.get((block.slab.index, block.slot))
                if kept is None:
                    raise Violation(f"INV-2: {key} is visible on the SSD of {node.name} and was not written")
                self._judge(node, key, kept[2], block, "SSD")
                self._seen[key][node.name] = self._world.now

    def _judge(self, node: NodeHost, key: Key, data: bytes, block: Block, where: str) -> None:
        oracle, now = self._world.oracle, self._world.now
        write = oracle.judge(key, data, f"{where} of {node.name}")
        if write.epoch != block.shelf.epoch:
            raise Violation(f"INV-1: {key} of epoch {write.epoch} is on a shelf of epoch {block.shelf.epoch}")
        oracle.standing(write, now, f"{where} of {node.name}")

    # ------------------------------------------------------------------ replicas

    @staticmethod
    def held(node: NodeHost) -> set[Key]:
        return {key for tier in (0, 1) for key, _ in visible(node, tier)}

    def gone(self, node: NodeHost, keys: set[Key]) -> None:
        """A node had these until now: it may have had them for less than it takes to look again."""
        for key in keys:
            self._seen[key][node.name] = self._world.now

    def let_go(self, node: NodeHost, keys: set[Key]) -> None:
        """A node was told that it had replicas too many of these, and has them no more: somebody else has, or had
        until something else took it away just now."""
        now = self._world.now
        for key in keys:
            self._let_go[key, node.name] = now
            if self._is_there(key):
                continue
            lately = {name: at for name, at in self._seen[key].items() if name != node.name and now - at < ON_ITS_WAY_S}
            if all(self._let_go.get((key, name), -1.0) >= at for name, at in lately.items()):
                raise Violation(f"replicas: {node.name} was told to let {key} go, and it was the last: {lately}")

    # ------------------------------------------------------------------ usage

    def limit_set(self, salt: str, limit: int | None) -> None:
        """A tenant's limit of memory over the whole cluster, from now on."""
        before = self._limits.get(salt)
        self._limits[salt], self._limited_at[salt] = limit, self._world.now
        if limit is None:
            self._allowed.pop(salt, None)
        elif before is None or limit < before or self._allowed[salt] > before:
            self._allowed[salt] = math.inf  # until every node has heard of it
        else:
            self._allowed[salt] = limit

    def emptied(self) -> None:
        """The store has lost all. What some other master has not read since only the leader knows: it may be killed
        with it, and one that has stood still may lead in its place with what it knew before."""
        unread = self._read_by_all()
        for salt, at in self._limited_at.items():
            if at > unread:
                self.limit_set(salt, None)
        for clearing in self._world.oracle.clearings:
            if clearing.answered_at is not None and clearing.answered_at > unread:
                clearing.answered_at = None

    def _read_by_all(self) -> float:
        """What was saved until then every master that is up has read, but who leads, which has said it."""
        up = [host for host in self._world.masters.values() if host.up]
        if not up:
            return -math.inf
        leading = [host for host in up if host.campaign.election.leading]
        leader = max(leading, key=lambda host: host.campaign.election.epoch, default=None)
        others = [host.store.read_at for host in up if host is not leader]
        return min([self._world.now - READ_BY_OTHERS_S, *others])

    def usage(self) -> None:
        """INV-11: no tenant uses more than its limit once its nodes work by that: when what each may come to use, or
        uses still, is within it."""
        for salt, limit in self._limits.items():
            if limit is None:
                continue
            used = self.used(salt)
            if self._allowed[salt] > limit and self._bound(salt) <= limit:
                self._allowed[salt] = limit
            allowed = self._allowed[salt]
            if used > allowed:
                raise Violation(
                    f"INV-11: tenant {salt} uses {used} bytes of memory, and may use {allowed}: {self._shares(salt)}"
                )
            if allowed == limit < self._handed_out(salt) < math.inf:  # else it was forgotten with an emptied store
                raise Violation(f"INV-11: of {limit} bytes of tenant {salt} more are handed out: {self._shares(salt)}")

    def _bound(self, salt: str) -> float:
        """What may come to be used, by all that the nodes have been told, and by the books of those who tell them."""
        books = [master.hub.read(_ledgers(salt)) for master in self._world.masters.values() if master.up and master.hub]
        if not books or max(books) > (self._limits[salt] or 0):
            return math.inf  # a raise may be on its way
        if not all(node.up for node in self._world.nodes.values()):
            return math.inf  # it comes back with what it remembers
        return self._handed_out(salt)

    def _handed_out(self, salt: str) -> float:
        """What the nodes that are up may come to use, or use still."""
        total = 0.0
        for node in self._world.nodes.values():
            if node.up:
                share = node.state.quotas.limit(Tier.DRAM, salt, node.process.clock())
                total += math.inf if share is None else max(share, node.state.inventory.policy.charges.get(salt, 0))
        return total

    def _shares(self, salt: str) -> str:
        up = [node for node in self._world.nodes.values() if node.up]
        return ", ".join(
            f"{node.name} {node.state.inventory.policy.charges.get(salt, 0)} of "
            f"{node.state.quotas.limit(Tier.DRAM, salt, node.process.clock())}"
            for node in up
        )

    def used(self, salt: str) -> int:
        return sum(node.state.inventory.policy.charges.get(salt, 0) for node in self._world.nodes.values() if node.up)

    # ------------------------------------------------------------------ at the end

    def cleared(self) -> None:
        """Everybody is back: what was answered is done by now, also on nodes that were not reached then."""
        for clearing in self._world.oracle.clearings:
            if clearing.answered_at is not None and clearing.done_at is None:
                clearing.done_at = self._world.now
        self._world.scheduler.run_until(self._world.now + 0.01)
        self.truth()

    def converged(self) -> None:
        """INV-7: each master's directory says what the nodes have, and no more."""
        for master in self._world.masters.values():
            self._agrees(master)
        for salt, limit in self._limits.items():
            if limit is not None and self.used(salt) > limit:
                raise Violation(f"INV-11: tenant {salt} uses {self.used(salt)} bytes, long after a limit of {limit}")

    def _agrees(self, master: MasterHost) -> None:
        if not master.up:
            raise Violation(f"INV-7: {master.name} is not up")
        assert master.hub is not None
        state = master.hub.read(lambda state, now: state)
        for node in self._world.nodes.values():
            known = state.nodes.get(node.name)
            if known is None or known.state is not Liveness.ACTIVE:
                what = "unknown" if known is None else known.state.value
                raise Violation(f"INV-7: {node.name} is {what} at {master.name}, long after all faults ended")
        holders = self._holders()
        for group in GROUPS:
            for salt in SALTS:
                self._table_agrees(master, group, salt, holders)

    def _table_agrees(self, master: MasterHost, group: str, salt: str, holders: dict[Key, set[str]]) -> None:
        hub, ns = master.hub, namespace(group)
        assert hub is not None
        keys = every_key(group)
        opened = ClientCalls(hub).open_namespace(ns)
        packed = b"".join(keys)
        answer = hub.read(
            lambda state, now: state.questions.lookup(
                ns, opened.group.number, salt, fold(packed, 16), "", now, opened.group.epoch
            )
        )
        if answer.not_yet:
            raise Violation(f"INV-7: {master.name} still says that it does not know yet")
        present = answer.found.present.tolist()
        codes = answer.found.codes.tolist()
        names = hub.read(
            lambda state, now: {code: state.membership.name_of((code - 1) >> 2) for code in set(codes) if code}
        )
        for key, here, code in zip(keys, present, codes, strict=True):
            told = Key(group, salt, key)
            if here and names[code] not in holders[told]:
                raise Violation(
                    f"INV-7: {master.name} says that {told} is on {names[code]}, and it is on {holders[told]}"
                )
            if not here and holders[told]:
                raise Violation(f"INV-7: {master.name} does not know {told}, which is on {sorted(holders[told])}")

    def read_all(self) -> Steps:
        """INV-7: everything that some node has can be read."""
        world = self._world
        client = world.clients[world.plan.client_names[0]]
        client.recent.__init__(clock=client.process.clock)  # type: ignore[misc]
        client.handles.clear()
        client.epochs.clear()
        for tier in (0, 1):
            for node in world.nodes.values():
                for key, _ in list(visible(node, tier)):
                    yield from self._read_one(client, node, key, tier)

    def _read_one(self, client, node: NodeHost, key: Key, tier: int) -> Steps:  # type: ignore[no-untyped-def]
        until = self._world.now + WORD_S
        while self._is_there(key):  # it may have left, for what was read before it
            status = yield from client.load(namespace(key.group), key.salt, key.hash, tier == 0)
            limited = node.state.quotas.limit(Tier.DRAM, key.salt, node.process.clock()) is not None
            if status[0] == _LOADED or (limited and status[0] in _NO_ROOM):
                return
            late = self._world.now >= (until + LEASED_S if status[0] == BlockStatus.NO_ROOM else until)
            if late and self._is_there(key):
                why = BlockStatus(status[0]).name
                raise Violation(
                    f"INV-7: {key} is on {node.name} ({'memory' if not tier else 'SSD'}) and a reader gets {why}"
                )
            yield 0.3

    def store_more(self) -> Steps:
        """INV-10: with everything evictable, a store finds room."""
        world = self._world
        client = world.clients[world.plan.client_names[0]]
        for number in range(3):
            hashes = chain("llama", 100 + number, 4)
            status = yield from client.store(namespace("llama"), "free", hashes, 0, True)
            if status != [_STORED] * 4:
                names = [BlockStatus(each).name for each in status]
                raise Violation(f"INV-10: nothing is in use, and a store of 4 blocks ends in {names}")

    # ------------------------------------------------------------------ in good order

    def epilogue(self) -> Steps:
        """Replicas are made, made again after a loss, and a drained node is missed by nobody."""
        world = self._world
        client = world.clients[world.plan.client_names[0]]
        for node in world.nodes:
            yield from client.admin(lambda host, node=node: world.drain(host, node, cancel=True))
        # A copy pushes out only what is colder: there is to be room.
        yield from client.admin(lambda host: world.drop(host, "", None))
        yield from client.admin(lambda host: world.set_replicas(host, "free", 2))
        yield 2.0
        yield from self.store_more()
        kept = yield from self._replicas(2, 30.0, "after a store")
        victim = world.nodes[world.plan.node_names[world.seed % len(world.nodes)]]
        world.tell(f"{victim.name} is lost")
        victim.kill()
        yield from self._replicas(2, 60.0, "after a loss", kept)
        victim.start()
        yield 5.0
        name = world.plan.node_names[(world.seed + 1) % len(world.nodes)]
        yield from client.admin(lambda host: world.drain(host, name, cancel=False))
        until = world.now + 60.0
        while world.nodes[name].state.draining.state is not DrainState.DRAINED:
            if world.now > until:
                raise Violation(
                    f"drains: {name} is not drained after 60 s: {world.nodes[name].state.draining.facts(0.0)}"
                )
            yield 0.5
        world.nodes[name].kill()
        left = self._free()
        gone = [key for key in kept if key not in left]
        if gone:
            raise Violation(f"drains: {name} is gone after its drain, and so are {[str(key) for key in gone]}")
        world.nodes[name].start()
        yield 5.0
        yield from client.admin(lambda host: world.drain(host, name, cancel=True))
        yield 5.0

    def _is_there(self, key: Key) -> bool:
        """Whether some node has it."""
        for node in self._world.nodes.values():
            entry = node.state.known.find(namespace(key.group)) if node.up else None
            for inventory in node.state.tiers() if entry is not None else ():
                shelf = inventory.shelves.get((entry.handle, key.salt))
                block = shelf.blocks.get(key.hash) if shelf is not None else None
                if block is not None and block.state == VISIBLE:
                    return True
        return False

    def _holders(self) -> dict[Key, set[str]]:
        """Who has what."""
        holders: dict[Key, set[str]] = defaultdict(set)
        for node in self._world.nodes.values():
            for tier in (0, 1):
                for key, _ in visible(node, tier):
                    holders[key].add(node.name)
        return holders

    def _free(self) -> dict[Key, set[str]]:
        return {key: nodes for key, nodes in self._holders().items() if key.salt == "free"}

    def _replicas(self, count: int, seconds: float, when: str, kept: set[Key] | None = None) -> Steps:
        """Wait until all that is there has so many replicas; those keys."""
        until = self._world.now + seconds
        while True:
            holders = self._free()
            short = {str(key): sorted(nodes) for key, nodes in holders.items() if len(nodes) < count}
            if holders and not short and (kept is None or kept <= holders.keys()):
                return set(holders)
            if self._world.now > until:
                lost = [str(key) for key in kept or () if key not in holders]
                raise Violation(f"replicas: {seconds:.0f} s {when} these have too few: {short}, and these none: {lost}")
            yield 0.5

    def quiet(self) -> None:
        """INV-5: nobody holds anything any more."""
        for node in self._world.nodes.values():
            state = node.state
            held = {"leases": len(state.leases), "reservations": len(state.reservations), "sessions": state.sessions}
            if node.ssd is not None:
                moves = node.ssd.moves
                held |= {
                    "moves": moves.moving,
                    "SSD reservations": len(moves.ssd.reservations),
                    "ahead": moves.ahead_bytes,
                }
            if any(held.values()):
                raise Violation(f"INV-5: {node.name} still has {held}")
            for inventory in state.tiers():
                odd = [block for block in inventory.blocks() if block.state != VISIBLE]
                if odd:
                    raise Violation(f"INV-5: {node.name} has {len(odd)} slots that nobody finds and nobody frees")


def _ledgers(salt: str) -> Callable[[MasterState, float], int]:
    def out(state: MasterState, now: float) -> int:
        tenant = state.quotas._tenants.get(salt)
        return tenant.ledgers[Tier.DRAM].out() if tenant is not None else 0

    return out


def visible(node: NodeHost, tier: int) -> list[tuple[Key, Block]]:
    """What can be read there."""
    tiers = node.state.tiers()
    if not node.up or node.state.left or tier >= len(tiers):
        return []
    return [
        (Key(shelf.entry.namespace.group, shelf.salt, key), block)
        for shelf in tiers[tier].shelves.values()
        for key, block in shelf.blocks.items()
        if block.state == VISIBLE
    ]


def every_key(group: str) -> list[bytes]:
    return [packed[i : i + 16] for n in range(4) for packed in [chain(group, n)] for i in range(0, len(packed), 16)]

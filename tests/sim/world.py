"""The whole cluster of a plan: its processes, its network, its store, and what is done to them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import xxhash

from kvstrata.master import messages as m
from kvstrata.master.state import MasterState
from kvstrata.proto.errors import Unavailable
from kvstrata.proto.status import HintKind
from kvstrata.storage.slab import slot_size
from tests.sim.checks import Checks
from tests.sim.client_host import ClientHost
from tests.sim.clock import Process, Scheduler
from tests.sim.master_host import MasterHost
from tests.sim.network import Network
from tests.sim.node_host import NodeHost
from tests.sim.oracle import BLOCK_BYTES, Clearing, Oracle
from tests.sim.plan import Action, Plan, chain, namespace
from tests.sim.shared_store import StoreServer

SLOT_BYTES = slot_size(BLOCK_BYTES)


class World:
    """Built from a plan; :meth:`act` does one of its actions, :meth:`mend` ends all faults."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.seed = plan.seed
        self.mended = False
        self.story: list[tuple[float, str]] = []
        self.scheduler = Scheduler()
        self.oracle = Oracle()
        self.network = Network(self.scheduler, random.Random(f"{plan.seed}/network"))
        self.store = StoreServer(lambda: self.scheduler.now)
        self.store_cuts: set[str] = set()
        self.master_names = plan.master_names
        self._skews = random.Random(f"{plan.seed}/skews")
        self._sessions: dict[Process, bytes] = {}
        self.masters = {name: MasterHost(self, name) for name in plan.master_names}
        self.clients = {name: ClientHost(self, name) for name in plan.client_names}
        self.nodes: dict[str, NodeHost] = {}
        for name, node in zip(plan.node_names, plan.nodes, strict=True):
            self.nodes[name] = NodeHost(self, name, node)
        self.checks = Checks(self)
        for host in self._hosts().values():
            host.start()

    # ------------------------------------------------------------------ what hosts ask of it

    @property
    def now(self) -> float:
        return self.scheduler.now

    def tell(self, words: str) -> None:
        self.story.append((self.now, words))

    def process(self, name: str) -> Process:
        """A new process: its clock shows something else than all others'."""
        return Process(self.scheduler, name, self._skews.uniform(10.0, 1e6))

    def session_of(self, process: Process) -> bytes:
        return self._sessions.setdefault(process, len(self._sessions).to_bytes(16, "little"))

    def host_of(self, process: Process) -> str:
        return "host-0" if process.name == "client-0" else ""

    @staticmethod
    def role_of(process: Process) -> str:
        return process.name.split("-")[0]

    @staticmethod
    def checksums(pieces: list[bytes]) -> array[int]:
        return array("Q", [xxhash.xxh3_64_intdigest(piece) for piece in pieces])

    def _hosts(self) -> dict[str, Any]:
        return {**self.masters, **self.nodes, **self.clients}

    # ------------------------------------------------------------------ actions

    def act(self, action: Action) -> None:
        self.tell(str(action))
        work = self._work(action) if action.group and action.who in self.clients else None
        if work is not None:
            client = self.clients[action.who]
            if client.up:
                work(client)
        else:
            self._fault(action)

    def _work(self, action: Action) -> Callable[[ClientHost], None]:
        ns, salt = namespace(action.group), action.salt
        hashes = chain(action.group, action.number, action.count)
        start = lambda steps: lambda client: client.process.start(steps(client))  # noqa: E731
        match action.kind:
            case "store":
                return start(lambda client: client.store(ns, salt, hashes, 0, action.pick < 0.5))
            case "load":
                return start(lambda client: client.load(ns, salt, hashes, action.pick < 0.3))
            case "prefetch":
                return start(lambda client: client.prefetch(ns, salt, hashes))
            case "remove":
                return start(lambda client: client.remove(ns, salt, hashes))
            case "hint":
                return lambda client: self._hint(action, hashes)
            case "quota":
                blocks = int(action.pick * 40)
                limit = None if action.pick > 0.85 else blocks * SLOT_BYTES
                return start(lambda client: client.admin(lambda host: self._set_quota(host, salt, limit)))
            case "replicas":
                count = int(action.pick * 4)
                return start(lambda client: client.admin(lambda host: self.set_replicas(host, salt, count)))
            case "bump":
                return start(lambda client: client.admin(lambda host: self._bump(host, action.group)))
        scope = action.group if action.pick < 0.5 else ""
        whose = salt if action.pick < 0.8 else None
        return start(lambda client: client.admin(lambda host: self.drop(host, scope, whose)))

    def _hint(self, action: Action, hashes: bytes) -> None:
        """Straight to a node: what a hint moves is no more than an order of leaving."""
        node = list(self.nodes.values())[int(action.pick * len(self.nodes))]
        if node.up and not node.process.stopped:
            handle, epoch = node.state.open_namespace(namespace(action.group))
            kind = list(HintKind)[action.number % 3]
            node.state.hint(handle, action.salt, hashes, epoch, kind, 5.0, node.process.clock())

    def _set_quota(self, host: MasterHost, salt: str, limit: int | None) -> tuple[int, frozenset[str], None]:
        hub = host.hub
        assert hub is not None
        policy = m.TenantPolicy(salt, limit, None)
        hub.order(lambda state, now: (None, state.set_tenant(policy, now)))
        self.checks.limit_set(salt, limit)
        self.tell(f"{host.name}: the limit of {salt} is {'none' if limit is None else limit}")
        if not hub.durable():
            self.checks.limit_set(salt, None)  # it may hold, or be forgotten
            raise Unavailable("the policy is in effect, and may be forgotten")
        return 0, frozenset(), None

    def set_replicas(self, host: MasterHost, salt: str, count: int) -> tuple[int, frozenset[str], None]:
        hub = host.hub
        assert hub is not None
        hub.order(lambda state, now: (state.replication.set_rule("", salt, count), state.taken()))
        self.tell(f"{host.name}: {salt} is to have {count} replicas")
        return 0, frozenset(), None

    def drain(self, host: MasterHost, node: str, *, cancel: bool) -> tuple[int, frozenset[str], None]:
        """An operator wants a node to be emptied, or to stay after all."""
        hub = host.hub
        assert hub is not None

        def change(state: MasterState, now: float) -> tuple[None, list[m.Command]]:
            if cancel:
                state.replication.leavers.undrain(node)
            else:
                state.replication.leavers.drain(node, 0.0, now)
            return None, state.taken()

        hub.order(change)
        self.tell(f"{host.name}: {node} is {'to stay' if cancel else 'being drained'}")
        return 0, frozenset(), None

    def _drain(self, node: str, *, cancel: bool) -> None:
        client = self.clients[self.plan.client_names[0]]
        if client.up:
            client.process.start(client.admin(lambda host: self.drain(host, node, cancel=cancel)))

    def _bump(self, host: MasterHost, group: str) -> tuple[int, frozenset[str], Clearing]:
        hub = host.hub
        assert hub is not None
        cleared = hub.order(lambda state, now: state.bump(group, now))
        clearing = Clearing(f"bump of {group} to {cleared.epoch}", group, self.now, below_epoch=cleared.epoch)
        return cleared.command, cleared.awaited, clearing

    def drop(self, host: MasterHost, group: str, salt: str | None) -> tuple[int, frozenset[str], Clearing]:
        hub = host.hub
        assert hub is not None
        cleared = hub.order(lambda state, now: state.drop(group, salt, False, now))
        return (
            cleared.command,
            cleared.awaited,
            Clearing(f"drop of {group or '*'}/{salt or '*'}", group, self.now, salt),
        )

    # ------------------------------------------------------------------ faults

    def _fault(self, action: Action) -> None:
        who, later = action.who, action.lasts
        host = self._hosts().get(who)
        match action.kind:
            case "kill node" | "kill master" | "kill client":
                if host.up:
                    host.kill() if who not in self.clients else host.process.kill()
                    self.scheduler.after(later, lambda: self._start(who))
            case "stop node" | "stop master" | "stop client":
                if host.up:
                    process = host.process
                    process.stop()
                    self.network.stalled(process)
                    self.scheduler.after(later, lambda: self._go_on(process))
            case "leave node":
                if host.up and not host.process.stopped:
                    host.leave(min(later, 3.0) if action.pick < 0.5 else 0.0)
                    self.scheduler.after(later + 4.0, lambda: self._start(who))
            case "drain node":
                self._drain(who, cancel=False)
                self.scheduler.after(later, lambda: self._drain(who, cancel=True))
            case "cut":
                self.network.cut(who, action.other)
                self.scheduler.after(later, lambda: self._heal(who, action.other))
            case "break":
                self.tell(f"  it is {self.network.break_one(action.pick)}")
            case "slow link":
                self.network.slow(who, action.other, 0.3 * action.pick)
                self.scheduler.after(later, lambda: self.network.slow(who, action.other, 0.0))
            case "slow disk":
                host.ssd_delay = min(5.0, later) * action.pick
                self.scheduler.after(later, lambda: setattr(host, "ssd_delay", 0.0))
            case "deaf disk":
                host.disk_refuses(True)
                self.scheduler.after(later, lambda: host.disk_refuses(False))
            case "store down":
                self.store.down = True
                self.scheduler.after(later, lambda: setattr(self.store, "down", False))
            case "store cut":
                self.store_cuts.add(who)
                self.scheduler.after(later, lambda: self.store_cuts.discard(who))
            case "store emptied":
                self.store.empty()
                self.checks.emptied()

    def _start(self, name: str) -> None:
        host = self._hosts()[name]
        if not host.process.alive:
            self.tell(f"{name} is started again")
            host.start()
        elif name in self.nodes and host.leaving:  # it was to be gone by now, and stood still meanwhile
            host.process.ends.append(lambda: self.scheduler.after(1.0, lambda: self._start(name)))

    def _go_on(self, process: Process) -> None:
        if process.alive and process.stopped:
            self.tell(f"{process.name} goes on")
            process.go_on()

    def _heal(self, one: str, other: str) -> None:
        self.tell(f"{one} and {other} can talk again")
        self.network.heal(one, other)

    def mend(self) -> None:
        """All faults end."""
        self.tell("all faults end")
        self.mended = True
        self.store.down = False
        self.store_cuts.clear()
        self.network.heal_all()
        for name, host in self._hosts().items():
            self._start(name)
            self._go_on(host.process)
        for name, node in self.nodes.items():
            node.ssd_delay = 0.0
            node.disk_refuses(False)
            self.scheduler.after(5.0, partial(self._drain, name, cancel=True))

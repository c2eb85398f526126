"""What will happen, all of it decided by a seed before anything runs: a cluster, and a list of actions.

An action stands for itself: without it the others are the same, which is what lets a failing list be cut short.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

from kvstrata.proto.keys import Namespace
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from tests.sim.oracle import BLOCK_BYTES

GROUPS = ("llama", "qwen")
SALTS = ("a", "b")
CHAINS = 4
CHAIN_BLOCKS = 12
#: Times of a story's actions are this far apart on average.
STEP_S = 0.04
#: One fault in so many steps.
FAULT_EVERY = 14
FAULTS = (
    "kill node", "stop node", "cut", "break", "slow link", "slow disk", "deaf disk", "kill client", "stop client",
    "kill master", "stop master", "store down", "store cut", "store emptied", "leave node", "drain node",
)  # fmt: skip
#: Faults that only mean something with several masters.
SEVERAL = frozenset({"store cut", "store emptied"})


def namespace(group: str) -> Namespace:
    return Namespace(group, BLOCK_BYTES, 16)


def chain(group: str, number: int, count: int = CHAIN_BLOCKS) -> bytes:
    """The packed hashes of a chain."""
    return b"".join(
        hashlib.blake2b(f"{group}/{number}/{index}".encode(), digest_size=16).digest() for index in range(count)
    )


@dataclass(frozen=True, slots=True)
class NodePlan:
    """``slabs`` of 8 blocks; ``extents`` of 7, 0 for no SSD. ``last_words``: its death is told of."""

    slabs: int
    extents: int
    policy: SsdPolicy
    host: str
    last_words: bool


@dataclass(frozen=True, slots=True)
class Action:
    """``lasts`` is for faults: seconds until the other end of it. ``pick`` decides what is open, in [0, 1)."""

    at: float
    kind: str
    who: str = ""
    other: str = ""
    group: str = ""
    salt: str = ""
    number: int = 0
    count: int = 0
    lasts: float = 0.0
    pick: float = 0.0

    def __str__(self) -> str:
        parts = [self.kind, self.who, self.other and f"and {self.other}", self.group, self.salt and f"salt {self.salt}"]
        if self.count:
            parts.append(f"chain {self.number} first {self.count}" if self.group else f"{self.count}")
        if self.lasts:
            parts.append(f"for {self.lasts:.2f} s")
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    masters: int
    clients: int
    nodes: tuple[NodePlan, ...]
    actions: tuple[Action, ...] = field(repr=False, default=())
    epilogue: bool = False  #: after all faults: replicas, a loss and a drain in good order

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node-{index}" for index in range(len(self.nodes)))

    @property
    def client_names(self) -> tuple[str, ...]:
        return tuple(f"client-{index}" for index in range(self.clients))

    @property
    def master_names(self) -> tuple[str, ...]:
        return tuple(f"master-{index}" for index in range(self.masters))


def planned(seed: int, steps: int, faults: frozenset[str] = frozenset(FAULTS), masters: int | None = None) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)
    count = rng.randint(2, 4)
    nodes = tuple(
        NodePlan(
            slabs=rng.randint(2, 4),
            extents=rng.choice((0, 4, 6)),
            policy=rng.choice((SsdPolicy.DEMOTE, SsdPolicy.DEMOTE, SsdPolicy.WRITE_THROUGH)),
            host=rng.choice(("host-0", "host-1")),
            last_words=rng.random() < 0.5,
        )
        for _ in range(count)
    )
    several = rng.choice((1, 1, 3))
    base = Plan(seed, several if masters is None else masters, rng.randint(1, 3), nodes)
    actions = tuple(_actions(base, steps, faults, rng))
    return Plan(base.seed, base.masters, base.clients, nodes, actions, epilogue=count > 2 and rng.random() < 0.25)


def _actions(plan: Plan, steps: int, faults: frozenset[str], rng: random.Random) -> list[Action]:
    at, actions = 2.0, []
    known = sorted(fault for fault in faults if plan.masters > 1 or fault not in SEVERAL)
    for _ in range(steps):
        at += rng.expovariate(1 / STEP_S)
        if known and rng.randrange(FAULT_EVERY) == 0:
            actions.append(_fault(plan, at, rng.choice(known), rng))
        else:
            actions.append(_work(plan, at, rng))
    return actions


def _work(plan: Plan, at: float, rng: random.Random) -> Action:
    kind = rng.choices(
        ("store", "load", "prefetch", "remove", "quota", "bump", "drop", "hint", "replicas"),
        (40, 45, 4, 4, 3, 0.5, 1, 2, 1.5),
    )[0]
    return Action(
        at,
        kind,
        who=rng.choice(plan.client_names),
        group=rng.choices(GROUPS, (3, 1))[0],
        salt=rng.choice(SALTS),
        number=rng.randrange(CHAINS),
        count=rng.randint(1, CHAIN_BLOCKS),
        pick=rng.random(),
    )


def _fault(plan: Plan, at: float, kind: str, rng: random.Random) -> Action:
    lasts = rng.choice((rng.uniform(0.05, 0.9), rng.uniform(0.5, 4.0), rng.uniform(2.0, 14.0)))
    who, other = "", ""
    match kind.split()[-1]:
        case "node" | "disk":
            who = rng.choice(plan.node_names)
        case "client":
            who = rng.choice(plan.client_names)
        case "master":
            who = rng.choice(plan.master_names)
        case "cut" | "link":
            if kind == "store cut":
                who = rng.choice(plan.master_names)
            else:
                who, other = rng.sample((*plan.node_names, *plan.client_names, *plan.master_names), 2)
    return Action(at, kind, who, other, lasts=lasts, pick=rng.random())

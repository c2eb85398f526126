"""The network: connections with a delay, ordered each way, that break, stall and are cut off.

As TCP does it: what is sent arrives once and in order or, when the connection breaks, from some point on not at all.
While two processes are cut off from each other what they say waits, and arrives after the cut; when that lasts,
the connection is given up at both ends.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.clock import Future, Process, Scheduler

#: A peer that does not answer keepalives for this long is given up (gRPC, both ends).
KEEPALIVE_S = 4.0
#: What a channel server waits for a peer that does not take its bytes.
STALL_S = 5.0


@dataclass(eq=False)
class End:
    """One side of a connection. ``said`` and ``closed`` are called in its process."""

    process: Process
    wire: Wire
    said: Callable[[Any], None] = lambda message: None
    closed: Callable[[str], None] = lambda why: None
    waiting: deque[Any] = field(default_factory=deque)  #: cut off on its way here
    arrives: float = 0.0

    @property
    def peer(self) -> End:
        left, right = self.wire.ends
        return right if self is left else left

    def say(self, message: Any) -> None:
        self.wire.carry(self, message)

    def close(self, why: str) -> None:
        """This side ends it: the other one hears of that."""
        self.wire.end(self, why)


class Wire:
    def __init__(self, network: Network, left: Process, right: Process, keepalive: bool) -> None:
        self.ends = End(left, self), End(right, self)
        self.open = True
        self.keepalive = keepalive
        self._network = network

    def carry(self, sender: End, message: Any) -> None:
        if not self.open:
            return
        net, to = self._network, sender.peer
        to.arrives = max(to.arrives, net.scheduler.now + net.delay(sender.process, to.process))
        net.scheduler.after(to.arrives - net.scheduler.now, lambda: self._arrive(to, message))

    def _arrive(self, to: End, message: Any) -> None:
        if not self.open:
            return
        if to.waiting or self._network.is_cut(*self.ends):
            to.waiting.append(message)
        else:
            to.process.take(lambda: self._deliver(to, message))

    def _deliver(self, to: End, message: Any) -> None:
        if self.open:
            to.said(message)
            to.process.worked()

    def flush(self) -> None:
        """The cut is over."""
        for end in self.ends:
            while end.waiting and self.open:
                message = end.waiting.popleft()
                end.process.take(lambda end=end, message=message: self._deliver(end, message))  # type: ignore[misc]

    def end(self, by: End | None, why: str) -> None:
        if not self.open:
            return
        self.open = False
        self._network.wires.discard(self)
        for end in self.ends:
            if end is not by:
                self._tell(end, why, self._network.scheduler.now + STALL_S)

    def _tell(self, end: End, why: str, until: float) -> None:
        net = self._network
        if net.is_cut(*self.ends) and net.scheduler.now < until:
            net.scheduler.after(0.25, lambda: self._tell(end, why, until))
        else:
            net.scheduler.after(
                net.delay(*(e.process for e in self.ends)), lambda: end.process.take(lambda: end.closed(why))
            )


class Network:
    """Who listens where, who is connected, who is cut off from whom."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler = scheduler
        self.wires = _Ordered()
        self._rng = rng
        self._listening: dict[str, tuple[Process, Callable[[End], None]]] = {}
        self._cuts: dict[frozenset[str], int] = {}
        self._slow: dict[frozenset[str], float] = {}

    # ------------------------------------------------------------------ connections

    def listen(self, address: str, process: Process, accept: Callable[[End], None]) -> None:
        self._listening[address] = process, accept
        process.ends.append(lambda: self._gone(process))

    def connect(self, who: Process, address: str, timeout_s: float, *, keepalive: bool = False) -> Future:
        """The future has our :class:`End` once the other side has accepted."""
        over = Future()
        who.after(timeout_s, lambda: over.fail(f"{address} does not answer"))
        if all(end is not self._killed for end in who.ends):
            who.ends.append(self._killed)
        self.scheduler.after(self._rng.uniform(0.0002, 0.002), lambda: self._knock(who, address, over, keepalive))
        return over

    def _killed(self) -> None:
        for wire in list(self.wires):
            dead = [end for end in wire.ends if not end.process.alive]
            if dead:
                wire.end(dead[0], "the peer died")

    def _gone(self, process: Process) -> None:
        for address, (owner, _) in list(self._listening.items()):
            if owner is process:
                del self._listening[address]
        self._killed()

    def _knock(self, who: Process, address: str, over: Future, keepalive: bool) -> None:
        found = self._listening.get(address)
        if found is None or not who.alive:
            over.fail(f"nobody listens on {address}")
            return
        process, accept = found
        if self.apart(who.name, process.name):
            return  # it times out
        wire = Wire(self, who, process, keepalive)
        self.wires.add(wire)
        mine, theirs = wire.ends

        def accepted() -> None:
            if over.done or not wire.open:
                wire.end(None, "too late")
                return
            delay = self.delay(process, who)
            mine.arrives = self.scheduler.now + delay  # nothing that is said overtakes it
            self.scheduler.after(delay, lambda: who.take(lambda: over.resolve(mine)))
            accept(theirs)

        process.take(accepted)

    def break_one(self, pick: float) -> str:
        """Reset one connection, whichever; says which."""
        wires = list(self.wires)
        if not wires:
            return "no connection"
        wire = wires[int(pick * len(wires))]
        wire.end(None, "connection reset")
        return " - ".join(end.process.name for end in wire.ends)

    def stalled(self, process: Process) -> None:
        """A process stands still: whoever sends it keepalives gives it up in a while."""

        def look() -> None:
            if process.alive and process.stopped:
                for wire in list(self.wires):
                    if wire.keepalive and any(end.process is process for end in wire.ends):
                        wire.end(None, "keepalive")

        self.scheduler.after(KEEPALIVE_S, look)

    # ------------------------------------------------------------------ weather

    def delay(self, one: Process, other: Process) -> float:
        slow = self._slow.get(frozenset((one.name, other.name)), 0.0)
        return self._rng.uniform(0.0001, 0.001) + slow * self._rng.uniform(0.5, 1.0)

    def slow(self, one: str, other: str, seconds: float) -> None:
        if seconds:
            self._slow[frozenset((one, other))] = seconds
        else:
            self._slow.pop(frozenset((one, other)), None)

    def cut(self, one: str, other: str) -> None:
        pair = frozenset((one, other))
        number = self._cuts[pair] = self.scheduler.count

        def give_up() -> None:
            if self._cuts.get(pair) == number:
                for wire in list(self.wires):
                    if wire.keepalive and {end.process.name for end in wire.ends} == pair:
                        wire.end(None, "keepalive")

        self.scheduler.after(KEEPALIVE_S, give_up)

    def heal(self, one: str, other: str) -> None:
        if self._cuts.pop(frozenset((one, other)), None) is not None:
            self.scheduler.after(self._rng.uniform(0.0, 0.3), self._flush)

    def heal_all(self) -> None:
        self._cuts.clear()
        self._slow.clear()
        self._flush()

    def _flush(self) -> None:
        for wire in list(self.wires):
            if not self.is_cut(*wire.ends):
                wire.flush()

    def is_cut(self, one: End, other: End) -> bool:
        return self.apart(one.process.name, other.process.name)

    def apart(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cuts


class _Ordered(dict[Wire, None]):
    """A set that keeps the order in which things came, so that a seed is a seed."""

    def add(self, wire: Wire) -> None:
        self[wire] = None

    def discard(self, wire: Wire) -> None:
        self.pop(wire, None)

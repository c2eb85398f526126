"""The loop that looks at the master every two seconds: counters for rates, and changes for the event log."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from kvstrata.master.hub import Hub
from kvstrata.master.state import MasterState
from kvstrata.master.status.flows import Flows, Moved, Told
from kvstrata.master.status.ring import STEP_S, CounterRing
from kvstrata.master.status.watching import Seen, Watch
from kvstrata.master.views import Views
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.status import Tier
from kvstrata.transfer.loops import Loop, Loops

#: The list of masters is asked of the store this often, beside the page's requests: a store may be slow.
ROLL_S: Final = 3.0
ROLL_BOUND_S: Final = 15.0
#: What limits refused is remembered at these distances, for a minute.
REFUSED_STEP_S: Final = 10.0
REFUSED_STEPS: Final = 7
#: Tenants of which it is remembered.
REFUSED_MAX: Final = 4096

HITS: Final = tuple(f"hit {tier.name.lower()}" for tier in Tier)
MOVED: Final = ("bytes out", "bytes in", "bytes copied")


@dataclass(frozen=True, slots=True)
class _Looked:
    """A moment of the state. ``refused``: bytes by tenant, where asked for; empty unless this master leads."""

    told: list[Told]
    states: dict[str, str]
    refused: dict[str, int] | None


class Sampler:
    """Thread-safe: one loop writes, requests read. ``masters`` asks who there is, ``refused`` counts refusals."""

    def __init__(
        self,
        hub: Hub,
        views: Views,
        masters: Callable[[], control.MasterList],
        refused: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._hub = hub
        self._views = views
        self._ask_masters = masters
        self._refused_counts = refused
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._ring = CounterRing((*hub.metrics.counted(), *MOVED))
        self._flows = Flows()
        self._watch = Watch()
        self._since: dict[str, tuple[str, float]] = {}
        self._refused: deque[tuple[float, dict[str, int]]] = deque(maxlen=REFUSED_STEPS)
        self._masters = control.MasterList()

    def start(self, loops: Loops) -> None:
        self.turn()
        self.ask_masters()
        loops.add(Loop("status", STEP_S, self.turn, bound_s=5 * STEP_S))
        loops.add(Loop("masters", ROLL_S, self.ask_masters, bound_s=ROLL_BOUND_S))

    def turn(self) -> None:
        """Take a sample, and note what has changed."""
        counted = self._hub.metrics.counted()
        due = self._refused_due()
        looked = self._hub.read(lambda state, _: _look(state, refused=due))
        report = self._views.health()
        leading, leader = self._hub.leads()
        refused = {f"{software} speaks another protocol": n for software, n in report.refused_versions.items()}
        refused.update(self._refused_counts())
        seen = Seen(tuple(report.problems), leading, leader, refused)
        now, at = self._clock(), self._wall()
        with self._lock:
            self._flows.turn(looked.told, now)
            self._ring.sample({**counted, **dict(zip(MOVED, self._flows.total, strict=True))}, now)
            self._age(looked.states, at)
            if looked.refused is not None:
                self._refused.append((now, looked.refused))
            happenings = self._watch.turn(seen)
        self._hub.events.extend(happenings, at)

    def _refused_due(self) -> bool:
        with self._lock:
            return not self._refused or self._clock() - self._refused[-1][0] >= REFUSED_STEP_S

    def _age(self, states: Mapping[str, str], at: float) -> None:
        before = self._since
        known = {node: before.get(node, ("", at)) for node in states}
        self._since = {node: known[node] if known[node][0] == state else (state, at) for node, state in states.items()}

    def ask_masters(self) -> None:
        """Bounded by what the store's calls are."""
        listed = self._ask_masters()
        with self._lock:
            self._masters = listed

    # ------------------------------------------------------------------ for the document

    def masters(self) -> control.MasterList:
        """As they were a moment ago."""
        with self._lock:
            return self._masters

    def grown(self, seconds: float) -> tuple[float, dict[str, int]]:
        """See :meth:`CounterRing.grown`."""
        with self._lock:
            return self._ring.grown(seconds)

    def series(self, names: tuple[str, ...], bucket_s: float, buckets: int) -> dict[str, list[int | None]]:
        with self._lock:
            return {name: self._ring.series(name, bucket_s, buckets) for name in names}

    def of_node(self, node_id: str) -> tuple[tuple[float, float, float], float | None]:
        """Bytes a second (out, in, copied), and the Unix time since when its state is what it is."""
        with self._lock:
            since = self._since.get(node_id)
            return self._flows.rates(node_id), None if since is None else since[1]

    def refused_lately(self, refused: Mapping[str, int]) -> dict[str, int]:
        """Bytes that limits refused tenants in the last minute, given what they refused until now. Of a tenant that
        was past the bound a minute ago it is not known: it is left out."""
        with self._lock:
            before = self._refused[0][1] if self._refused else {}
        whole = len(before) < REFUSED_MAX
        return {salt: max(0, total - before.get(salt, 0)) for salt, total in refused.items() if whole or salt in before}

    def check(self) -> None:
        with self._lock:
            self._ring.check()
            self._flows.check()
            self._watch.check()


def _look(state: MasterState, *, refused: bool) -> _Looked:
    told = []
    for node in state.nodes:
        usage, facts = node.usage, node.facts
        if usage is not None and facts is not None:
            moved = Moved(usage.bytes_out, usage.bytes_in, usage.bytes_copied)
            told.append(Told(node.node_id, facts.incarnation, moved))
    states = {node.node_id: node.state.value for node in state.nodes}
    return _Looked(told, states, _refused(state) if refused else None)


def _refused(state: MasterState) -> dict[str, int]:
    if not state.leading:
        return {}
    rows = ((salt, tenant.refused) for salt, tenant in state.quotas.tenants() if tenant.refused)
    return dict(islice(rows, REFUSED_MAX))


def hits_and_misses(counts: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Of counters by their names in the ring: blocks found by tier, and not found by reason."""
    found = {name.removeprefix("hit "): n for name, n in counts.items() if name.startswith("hit ")}
    missed = {name.removeprefix("miss "): n for name, n in counts.items() if name.startswith("miss ")}
    return found, missed


def plain_lookups(seconds: float, counts: Mapping[str, int]) -> dict[str, Any]:
    """Lookups of a span, for JSON: asked = hits by tier + misses by reason. ``hit_rate`` is None when none asked."""
    found, missed = hits_and_misses(counts)
    asked = counts["asked"]
    return {
        "seconds": round(seconds, 1),
        "lookups": counts["lookups"],
        "asked": asked,
        "hits": {tier: n for tier, n in found.items() if n or tier != "hbm"},
        "misses": {reason: n for reason, n in sorted(missed.items(), key=lambda row: -row[1]) if n},
        "hit_rate": round(sum(found.values()) / asked, 4) if asked else None,
    }

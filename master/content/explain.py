"""Why is it not here? What is known of a block, or of a request's lookup, put into a verdict.

Nothing is recorded for this alone: holders, ghosts, graves, intents, and the chronicle are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

import numpy as np

from kvstrata.master.content.advice import TEXTS, text_of
from kvstrata.master.content.chronicle import Line
from kvstrata.master.content.lookups import Asked
from kvstrata.master.content.misses import MissReason
from kvstrata.master.directory.directory import TableKey
from kvstrata.master.directory.holders import HIDDEN
from kvstrata.master.directory.probing import Keys
from kvstrata.master.namespaces import Group
from kvstrata.master.state import MasterState
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.folding import fold
from kvstrata.proto.status import Tier

#: Tables looked into for one answer, and places and lines named in it.
TABLES_MAX: Final = 2048
NAMED_MAX: Final = 64
#: Tables whose part of the chronicle is read: a pass over all of it each.
STORIES_MAX: Final = 16
PRESENT: Final = "present"


@dataclass(frozen=True, slots=True)
class Explanation:
    """``verdict`` is a :class:`MissReason`'s label or ``present``; ``where`` and ``elsewhere`` are for people."""

    verdict: str
    text: str
    story: tuple[Line, ...] = ()
    where: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    asked: int = 0
    hit: int = 0
    block: bytes = b""
    group: str = ""
    salt: str = ""


@dataclass(slots=True)
class _Evidence:
    """What was found of one hash. ``left`` is (reason, not before, not after) of the newest departure."""

    where: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    complete: bool = False
    held: MissReason | None = None
    coming: bool = False
    left: tuple[MissReason, float, float] | None = None
    other: MissReason | None = None
    story: list[Line] = field(default_factory=list)
    table: TableKey | None = None


def explain_block(state: MasterState, block: bytes, group: str, salt: str | None, now: float) -> Explanation:
    """A verdict on one hash: whole, or the 16 bytes as listings show it. ``group`` "" and ``salt`` None are any.

    Raises :class:`InvalidArgument` for an unknown group, or a hash that none can have.
    """
    groups = [state.namespaces.named(group)] if group else state.namespaces.groups
    fitting = [known for known in groups if len(block) in (16, known.hash_bytes)]
    if not fitting:
        what = f"namespace {group!r} has" if group else "any known namespace has"
        raise InvalidArgument(f"a hash of {len(block)} bytes is not one that {what}")
    key = fold(block, len(block))
    evidence = _gathered(state, key, _tables(state, fitting, salt), now)
    _look_elsewhere(state, key, fitting, salt, evidence)
    return _judged(state, evidence, key, group, salt, now)


def explain_request(state: MasterState, request: str, now: float) -> Explanation:
    """A verdict on the newest lookup of that name. Raises :class:`InvalidArgument` when none is remembered."""
    asked = state.questions.requests.find(request)
    if asked is None:
        raise InvalidArgument(
            f"no lookup of a request {request!r} is remembered: the newest {len(state.questions.requests)} are, "
            "by the engine's name of the request"
        )
    count, salt = len(asked.keys), asked.table.salt
    summary = f"{asked.hit_blocks} of {count} blocks were found {_age(now - asked.at)} ago"
    failed = _failed(state, asked)
    if failed is not None:
        line, key = failed
        verdict = MissReason.LOAD_FAILED
        text = f"{summary}; then node {line.node_id} did not give one of them: {text_of(verdict, line.status)}"
    elif asked.reason is None:
        key, text, verdict = asked.keys[-1:], f"{summary}: {TEXTS[MissReason.PARTIAL_BLOCK]}", MissReason.PARTIAL_BLOCK
    else:
        return _of_prefix_end(state, asked, summary, now)
    story = tuple(_story(state, asked.group, asked.table, key))
    return Explanation(verdict.label, text, story, (), (), count, asked.hit_blocks, key.tobytes(), asked.group, salt)


def _of_prefix_end(state: MasterState, asked: Asked, summary: str, now: float) -> Explanation:
    assert asked.reason is not None
    key = np.ascontiguousarray(asked.keys[asked.hit_blocks : asked.hit_blocks + 1])
    group = state.namespaces.named(asked.group)
    tables = [asked.table._replace(group=group.number, shard=shard) for shard in range(group.shard_count)]
    evidence = _gathered(state, key, tables, now)
    _look_elsewhere(state, key, [group], asked.table.salt, evidence)
    judged = _judged(state, evidence, key, asked.group, asked.table.salt, now)
    verdict, text = judged.verdict, judged.text
    if asked.reason is not MissReason.NEVER_STORED and verdict != asked.reason.label:
        verdict, text = asked.reason.label, f"{TEXTS[asked.reason]} (Now: {judged.verdict}.)"
    text = f"{summary}; block {asked.hit_blocks} ended the prefix: {text}"
    return replace(judged, verdict=verdict, text=text, asked=len(asked.keys), hit=asked.hit_blocks)


def _failed(state: MasterState, asked: Asked) -> tuple[Line, Keys] | None:
    group = state.namespaces.named(asked.group)
    about = asked.table._replace(group=group.first)
    failures = state.chronicle.failures(about, asked.keys[: asked.hit_blocks], asked.at)
    return (failures[0][0], np.ascontiguousarray(failures[0][1][:1])) if failures else None


# ---------------------------------------------------------------------- evidence


def _tables(state: MasterState, groups: list[Group], salt: str | None) -> list[TableKey]:
    numbers = {group.number for group in groups}
    if len(groups) == 1 and salt is not None:
        return [TableKey(groups[0].number, shard, salt) for shard in range(groups[0].shard_count)]
    within = (key for key in state.directory.remembered() if key.group in numbers and salt in (None, key.salt))
    return list(islice(within, TABLES_MAX))


def _gathered(state: MasterState, key: Keys, tables: Sequence[TableKey], now: float) -> _Evidence:
    evidence = _Evidence()
    told = 0
    shards: dict[tuple[int, str], int] = {}
    for table in tables:
        group = state.namespaces.by_number(table.group)
        if group is None:
            continue
        known = bool(state.directory.known_ids(table, key)[0]) or bool(state.directory.graves.holds(table, key)[0])
        if known and _look_into(state, key, table, group, evidence):
            shards[table.group, table.salt] = shards.get((table.group, table.salt), 0) + 1
            evidence.complete |= shards[table.group, table.salt] == group.shard_count
        evidence.coming |= state.questions.in_flight(table, key, now)
        if (known or len(tables) <= STORIES_MAX) and told < STORIES_MAX:
            told += 1
            evidence.story += state.chronicle.story(table._replace(group=group.first), key)
    if shards and not evidence.complete:
        evidence.held = MissReason.SHARD_MISSING
    evidence.story = sorted(evidence.story, key=lambda line: line.at)[-NAMED_MAX:]
    return evidence


def _look_into(state: MasterState, key: Keys, table: TableKey, group: Group, evidence: _Evidence) -> bool:
    """True when this table's shard of the block can be read from somewhere."""
    directory = state.directory
    set_id = int(directory.known_ids(table, key)[0])
    names = places(state, set_id)
    shard = f" (shard {table.shard})" if group.shard_count > 1 else ""
    evidence.where += [f"{name}{shard}" for name in names]
    ghost = directory.ghost(table, key)
    grave = directory.graves.find(table)
    if ghost is not None:
        _newest(evidence, table, ghost.reason, ghost.since, ghost.until)
    elif set_id == 0 and grave is not None and directory.graves.holds(table, key)[0]:
        _newest(evidence, table, grave.reason, grave.at, grave.at)
    elif set_id:
        evidence.table = table
        evidence.held = MissReason(int(directory.reasons(np.array([set_id], dtype=np.uint32))[0]))
    return any(tier != HIDDEN and slot in state.membership.slot_facts for slot, tier in directory.holders_of(set_id))


def _newest(evidence: _Evidence, table: TableKey, reason: MissReason, since: float, until: float) -> None:
    if evidence.left is None or until > evidence.left[2]:
        evidence.left = (reason, since, until)
        evidence.table = evidence.table or table


def _look_elsewhere(state: MasterState, key: Keys, groups: list[Group], salt: str | None, evidence: _Evidence) -> None:
    """The same hash under other tenants, or in other namespaces."""
    numbers = {group.number for group in groups}
    for table in islice(state.directory.remembered(), TABLES_MAX):
        same_group, same_salt = table.group in numbers, salt in (None, table.salt)
        group = state.namespaces.by_number(table.group)
        if group is None or (same_group and same_salt) or len(evidence.elsewhere) >= NAMED_MAX:
            continue
        if places(state, int(state.directory.known_ids(table, key)[0])):
            evidence.elsewhere.append(f"tenant {table.salt!r} in namespace {group.name!r}")
            if same_group or evidence.other is None:
                evidence.other = MissReason.OTHER_SALT if same_group else MissReason.OTHER_FINGERPRINT


def places(state: MasterState, set_id: int) -> list[str]:
    """``node/tier`` of each holder of a set; a tier that a reader did not find is ``hidden``."""
    return [
        f"{name}/{'hidden' if tier == HIDDEN else Tier(tier).name.lower()}"
        for slot, tier in state.directory.holders_of(set_id)
        if (name := state.membership.name_of(slot))
    ]


def _story(state: MasterState, name: str, table: TableKey, key: Keys) -> list[Line]:
    group = state.namespaces.named(name)
    return state.chronicle.story(table._replace(group=group.first), key)[-NAMED_MAX:]


# ---------------------------------------------------------------------- verdict


def _judged(
    state: MasterState, evidence: _Evidence, key: Keys, group: str, salt: str | None, now: float
) -> Explanation:
    reason = _reason(evidence)
    if reason is None:
        verdict, text = PRESENT, f"it is there: {', '.join(evidence.where)}."
    else:
        line = _newest_line(evidence, reason)
        text = text_of(reason, line.status if line is not None else None)
        verdict, text = reason.label, _when(evidence, reason, line, now) + text
    table = evidence.table
    known = None if table is None else state.namespaces.by_number(table.group)
    return Explanation(
        verdict,
        text,
        tuple(evidence.story),
        tuple(evidence.where[:NAMED_MAX]),
        tuple(evidence.elsewhere),
        block=key.tobytes(),
        group=group or ("" if known is None else known.name),
        salt=salt if salt is not None else ("" if table is None else table.salt),
    )


def _reason(evidence: _Evidence) -> MissReason | None:
    """None: it is there."""
    if evidence.complete:
        return None
    if evidence.held is not None:
        return evidence.held
    if evidence.coming:
        return MissReason.IN_FLIGHT
    told = [line for line in evidence.story if line.node_id or line.reason is not None]
    if told and told[-1].reason is MissReason.REFUSED_AT_STORE:
        return MissReason.REFUSED_AT_STORE
    if evidence.left is not None:
        return evidence.left[0]
    return evidence.other or MissReason.NEVER_STORED


def _newest_line(evidence: _Evidence, reason: MissReason) -> Line | None:
    return next((line for line in reversed(evidence.story) if line.reason is reason), None)


def _when(evidence: _Evidence, reason: MissReason, line: Line | None, now: float) -> str:
    """When, where and for whom, as exactly as is remembered; empty where it does not apply."""
    if line is not None:
        at = f" at node {line.node_id}" if line.node_id else ""
        need = f", for tenant {line.cause!r}" if line.cause else ""
        return f"{_age(now - line.at)} ago{at}{need}: "
    if evidence.left is not None and evidence.left[0] is reason:
        _, since, until = evidence.left
        return f"between {_age(now - until)} and {_age(now - since)} ago: "
    return ""


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def lines(explanation: Explanation, now: float) -> Iterator[tuple[float, str, str]]:
    """(age in seconds, what, node) of the story, oldest first."""
    for line in explanation.story:
        why = f": {line.reason.label}" if line.reason is not None else ""
        cause = f", for tenant {line.cause!r}" if line.cause else ""
        yield max(0.0, now - line.at), f"{line.what}{why}{cause}", line.node_id

"""Events in words: from what the state reports to its log, to what an operator reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvstrata.master.status.events import Happening, Severity

Fields = Mapping[str, Any]


def happening_of(event: str, fields: Fields) -> Happening:
    """A line of the log as an event. One that is not known here is told as it is."""
    word = _WORDS.get(event)
    if word is not None:
        return word(fields)
    told = ", ".join(f"{key} {value}" for key, value in fields.items() if key != "node_id")
    return Happening("log", f"{event}: {told}" if told else event, Severity.INFO, str(fields.get("node_id", "")))


def _node_state(fields: Fields) -> Happening:
    node, state, was, reason = (str(fields.get(key, "")) for key in ("node_id", "state", "was", "reason"))
    because = f": {reason}" if reason else ""
    if state == "offline":
        planned = reason.startswith(("detached", "an operator"))
        severity = Severity.NOTICE if planned else Severity.CRITICAL
        return Happening("node.offline", f"node {node} is gone{because}", severity, node)
    if state == "suspected":
        return Happening("node.suspected", f"node {node} is not routed to{because}", Severity.WARNING, node)
    if state == "joining":
        return Happening("node.joining", f"node {node} has attached; its blocks are being listed", about=node)
    back = "serves again" if was == "suspected" else "serves"
    return Happening("node.active", f"node {node} {back}", about=node)


def _of_node(kind: str, text: str, severity: Severity) -> Callable[[Fields], Happening]:
    def word(fields: Fields) -> Happening:
        named = {"node_id": "?", "reason": "", "group": "?", "epoch": "?", "command": "?", **fields}
        return Happening(kind, text.format_map(_Plain(named)), severity, str(named["node_id"]))

    return word


class _Plain(dict[str, Any]):
    """Values that come from outside go in as they are, and a key that is missing as "?"."""

    def __missing__(self, key: str) -> str:
        return "?"


def _leads(fields: Fields) -> Happening:
    return Happening("leader", f"this master leads, epoch {fields.get('epoch')}", Severity.NOTICE)


def _leads_on(fields: Fields) -> Happening:
    return Happening("leader", f"this master leads on in epoch {fields.get('epoch')}", Severity.NOTICE)


def _leads_no_more(fields: Fields) -> Happening:
    return Happening("leader", f"this master leads no more: {fields.get('reason', '')}", Severity.WARNING)


def _saved_refused(fields: Fields) -> Happening:
    text = f"namespace {fields.get('group')}, as it was saved, is refused: {fields.get('reason')}"
    return Happening("store", text, Severity.WARNING)


def _written_again(fields: Fields) -> Happening:
    return Happening("store", "the state store had lost something; it was written again", Severity.WARNING)


def _drain_begins(fields: Fields) -> Happening:
    node = str(fields.get("node_id", "?"))
    return Happening("node.drain", f"node {node} is being drained", Severity.NOTICE, node)


def _drain_cancelled(fields: Fields) -> Happening:
    node = str(fields.get("node_id", "?"))
    return Happening("node.drain", f"the drain of node {node} was cancelled: it stays", Severity.NOTICE, node)


def _drain_over(fields: Fields) -> Happening:
    node, problem = str(fields.get("node_id", "?")), str(fields.get("problem", ""))
    if problem:
        return Happening("node.drain", f"the drain of node {node} is over; {problem}", Severity.WARNING, node)
    return Happening("node.drain", f"node {node} is drained: it may be stopped", Severity.NOTICE, node)


def _floors(fields: Fields) -> Happening:
    text = f"the floors of {fields.get('tenants')} tenants do not fit the nodes that are here"
    return Happening("tenant.floors", text, Severity.WARNING)


_WORDS: Final[dict[str, Callable[[Fields], Happening]]] = {
    "node state": _node_state,
    "node removed": _of_node("node.removed", "node {node_id} was taken off the roster", Severity.NOTICE),
    "snapshot asked for": _of_node(
        "node.resync", "node {node_id} is to list its blocks anew: {reason}", Severity.NOTICE
    ),
    "node holds a namespace that is refused": _of_node(
        "node.refused", "node {node_id} holds namespace {group}, which is refused: {reason}", Severity.WARNING
    ),
    "node knows a newer weight epoch": _of_node(
        "content.epoch", "node {node_id} knows weight epoch {epoch} of {group}: it holds now", Severity.WARNING
    ),
    "node could not do as told": _of_node(
        "node.failed", "node {node_id} could not do as it was told: {reason}", Severity.WARNING
    ),
    "leads": _leads,
    "leads on": _leads_on,
    "leads no more": _leads_no_more,
    "a saved namespace is refused": _saved_refused,
    "the state store had lost something: written again": _written_again,
    "drain begins": _drain_begins,
    "drain cancelled": _drain_cancelled,
    "drain over": _drain_over,
    "floors do not fit the nodes that are here": _floors,
}

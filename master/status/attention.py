"""What an operator should look at, worst first, worked out from the status document alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvstrata.master.status.events import Severity
from kvstrata.master.status.meaning import MEANING

#: A hit rate is called falling when so many blocks were asked, and it is so much below that of the hour.
ASKED_MIN: Final = 1000
FALL: Final = 0.15
SHOWN_MAX: Final = 24
#: Rows of one kind; more of it are one row.
OF_A_KIND_MAX: Final = 5

Document = Mapping[str, Any]
_MEANS: Final = {reason.label: means for reason, (means, _) in MEANING.items()}
_DO: Final = {reason.label: do for reason, (_, do) in MEANING.items()}


def attention(document: Document) -> list[dict[str, str]]:
    """Rows with ``severity``, ``kind``, ``text`` and ``do`` ("" where there is nothing to do), worst first."""
    found = [
        row
        for rule in (_problems, _leader, _readiness, _nobody, _nodes, _devices, _drains, _tenants, _hit_rate, _versions)
        for row in _bounded(list(rule(document)))
    ]
    found.sort(key=lambda row: -Severity[row["severity"].upper()])
    return found[:SHOWN_MAX]


def verdict(rows: list[dict[str, str]]) -> str:
    """``trouble``, ``attention`` or ``healthy``."""
    severities = {row["severity"] for row in rows}
    if "critical" in severities:
        return "trouble"
    return "attention" if "warning" in severities else "healthy"


def _row(severity: Severity, kind: str, text: str, do: str = "") -> dict[str, str]:
    return {"severity": severity.label, "kind": kind, "text": text, "do": do}


def _bounded(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    if len(rows) <= OF_A_KIND_MAX:
        return rows
    rows.sort(key=lambda row: -Severity[row["severity"].upper()])
    more = len(rows) - OF_A_KIND_MAX + 1
    last = rows[OF_A_KIND_MAX - 1]
    return [*rows[: OF_A_KIND_MAX - 1], {**last, "text": f"and {more} more like these"}]


def _problems(document: Document) -> Iterator[dict[str, str]]:
    for problem in document["problems"]:
        yield _row(Severity.CRITICAL, "health", problem, "see the runbook, and this master's log")
    for warning in document["warnings"]:
        yield _row(Severity.WARNING, "health", warning)


def _leader(document: Document) -> Iterator[dict[str, str]]:
    if not document["master"]["leading"] and not document["leader"]:
        yield _row(
            Severity.CRITICAL,
            "leader",
            "nobody leads: policies cannot be changed, and nothing is balanced or copied",
            "see whether the state store answers",
        )
    if document["masters_problem"]:
        yield _row(Severity.WARNING, "masters", document["masters_problem"], "see whether the state store answers")


def _readiness(document: Document) -> Iterator[dict[str, str]]:
    if not document["master"]["ready"]:
        yield _row(
            Severity.WARNING,
            "ready",
            'not ready: nodes of the roster are awaited, and lookups may answer "not yet"',
            "wait a few seconds; then see which nodes are missing",
        )


def _nobody(document: Document) -> Iterator[dict[str, str]]:
    if not document["nodes"] and document["master"]["ready"]:
        yield _row(
            Severity.WARNING,
            "nodes",
            "no node has attached: nothing can be stored",
            f"start one: kvstrata storage --master {document['master']['channel']} --dram 8GiB",
        )


def _nodes(document: Document) -> Iterator[dict[str, str]]:
    for node in document["nodes"]:
        name, state = node["node_id"], node["state"]
        if node["gone"]:
            continue  # it said goodbye
        if state == "offline":
            yield _row(
                Severity.CRITICAL,
                "node",
                f"node {name} is missing",
                f"start it again, or take it off the roster: kvstrata node remove {shlex.quote(name)}",
            )
        elif state == "suspected":
            yield _row(Severity.WARNING, "node", f"node {name} does not answer: nothing is routed there", "see its log")


def _devices(document: Document) -> Iterator[dict[str, str]]:
    for node in document["nodes"]:
        for device in node["devices"]:
            if device["state"] == "failed":
                text = f"device {device['path']} of node {node['node_id']} has failed: {device['problem']}"
                yield _row(Severity.WARNING, "device", text, "replace the device, then start the node again")


def _drains(document: Document) -> Iterator[dict[str, str]]:
    for node in document["nodes"]:
        drain = node["drain"]
        if drain is None:
            continue
        name = node["node_id"]
        if drain["state"] == "out of time":
            yield _row(Severity.WARNING, "drain", f"the drain of node {name} ran out of time", "drain it again")
        elif drain["state"] == "drained":
            yield _row(Severity.NOTICE, "drain", f"node {name} is drained", "stop it, or undrain it")
        else:
            yield _row(Severity.NOTICE, "drain", f"node {name} is being drained")


def _tenants(document: Document) -> Iterator[dict[str, str]]:
    for tenant in document["tenants"] or ():
        if tenant["state"] == "full" and tenant["refused_bytes_last_minute"]:
            yield _row(
                Severity.WARNING,
                "tenant",
                f"tenant {tenant['name']} is at its limit, and its blocks leave or are refused",
                f"see what a larger one would give: kvstrata tenant get {shlex.quote(tenant['name'])}",
            )


def _hit_rate(document: Document) -> Iterator[dict[str, str]]:
    minute, hour = document["lookups"]["minute"], document["lookups"]["hour"]
    if minute["asked"] < ASKED_MIN or hour["asked"] < 2 * minute["asked"]:
        return
    if hour["hit_rate"] - minute["hit_rate"] < FALL:
        return
    text = f"the hit rate fell to {minute['hit_rate']:.0%}, from {hour['hit_rate']:.0%} in the last hour"
    reason = risen(minute, hour)
    more = f"; more are missing because: {_MEANS.get(reason, reason)}" if reason else ""
    yield _row(Severity.WARNING, "hit rate", text + more, _DO.get(reason, ""))


def risen(minute: Mapping[str, Any], hour: Mapping[str, Any]) -> str:
    """The reason whose part of the blocks asked has grown most; "" for none."""
    growth = {
        reason: count / minute["asked"] - hour["misses"].get(reason, 0) / hour["asked"]
        for reason, count in minute["misses"].items()
    }
    best = max(growth, key=lambda reason: growth[reason], default="")
    return best if best and growth[best] > 0 else ""


def _versions(document: Document) -> Iterator[dict[str, str]]:
    for software, count in document["refused"]["versions"].items():
        yield _row(
            Severity.WARNING,
            "version",
            f"{software} was refused {count} times: it speaks another protocol version",
            "upgrade the older side",
        )
    spoken = {node["software"] for node in document["nodes"] if node["software"]}
    if len(spoken) > 1:
        yield _row(Severity.NOTICE, "version", f"nodes run {len(spoken)} versions: {', '.join(sorted(spoken)[:4])}")

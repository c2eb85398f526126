"""What an operator is told to look at, and changes that nobody reports."""

from __future__ import annotations

import pytest

from kvstrata.master.status.attention import SHOWN_MAX, attention, risen, verdict
from kvstrata.master.status.events import Severity
from kvstrata.master.status.salts import shown
from kvstrata.master.status.watching import PROBLEMS_MAX, Seen, Watch
from tests.e2e import status_documents as documents


def test_a_pool_that_is_well_needs_nobody() -> None:
    assert documents.healthy()["verdict"] == "healthy"
    assert [row["severity"] for row in documents.healthy()["attention"] if row["severity"] != "notice"] == []


def test_worst_first_and_what_to_do() -> None:
    rows = documents.trouble()["attention"]
    assert [row["kind"] for row in rows] == ["health", "node", "node", "device", "tenant", "hit rate", "drain"]
    assert verdict(rows) == "trouble"
    missing = rows[1]
    assert missing["text"] == "node node-05 is missing" and "kvstrata node remove node-05" in missing["do"]
    assert "its node was lost" in next(row["text"] for row in rows if row["kind"] == "hit rate")


def test_a_node_that_said_goodbye_is_not_missing() -> None:
    document = documents.healthy()
    document["nodes"][0] |= {"state": "offline", "gone": True}
    assert verdict(attention(document)) == "healthy"


def test_nobody_leads() -> None:
    document = documents.standby()
    assert verdict(attention(document)) == "healthy"
    assert verdict(attention({**document, "leader": None})) == "trouble"


def test_an_empty_pool_says_how_to_begin() -> None:
    document = documents.empty()
    assert document["verdict"] == "attention"
    assert "kvstrata storage --master 127.0.0.1:7400" in document["attention"][0]["do"]


def test_a_command_to_copy_quotes_what_it_names() -> None:
    document = documents.healthy()
    document["nodes"] = [documents.node(1, "x; rm -rf /", state="offline")]
    assert attention(document)[0]["do"].endswith("kvstrata node remove 'x; rm -rf /'")


def test_many_of_a_kind_are_few_rows() -> None:
    document = documents.hostile()
    for node in document["nodes"]:
        node["state"] = "offline"
    rows = attention(document)
    assert len(rows) <= SHOWN_MAX and sum(row["kind"] == "node" for row in rows) == 5
    assert any("and 96 more" in row["text"] for row in rows if row["kind"] == "node")


def test_a_hit_rate_is_not_called_falling_by_a_few_blocks_or_at_the_start() -> None:
    document = documents.trouble()
    minute = document["lookups"]["minute"]

    def told() -> bool:
        return any(row["kind"] == "hit rate" for row in attention(document))

    assert told()
    document["lookups"]["hour"] = minute
    assert not told()
    document = documents.trouble()
    document["lookups"]["minute"] = documents.lookups(999, 10, 0, {"never_stored": 989}, 60)
    assert not told()


def test_the_reason_that_has_risen_most() -> None:
    hour = documents.lookups(1000, 500, 0, {"never_stored": 450, "evicted_room": 50}, 3600)
    minute = documents.lookups(100, 40, 0, {"never_stored": 45, "evicted_room": 15}, 60)
    assert risen(minute, hour) == "evicted_room"
    assert risen(hour, hour) == ""


def test_problems_come_and_go_once_though_their_numbers_change() -> None:
    watch = Watch()
    assert watch.turn(Seen()) == []
    (began,) = watch.turn(Seen(("tick: no turn for 1.5 s",)))
    assert (began.kind, began.severity) == ("problem", Severity.CRITICAL)
    assert watch.turn(Seen(("tick: no turn for 2.5 s",))) == []
    (ended,) = watch.turn(Seen())
    assert (ended.kind, ended.text) == ("problem.over", "over: tick: no turn for 2.5 s")
    watch.turn(Seen(tuple(f"problem {chr(97 + at % 26)}{'x' * at}" for at in range(PROBLEMS_MAX * 2))))
    watch.check()


def test_leaders_and_refusals() -> None:
    watch = Watch()
    watch.turn(Seen(leader="a:1", refused={"old": 3}))
    assert watch.turn(Seen(leader="a:1", refused={"old": 3})) == []
    leader, refused = watch.turn(Seen(leader="b:1", refused={"old": 4}))
    assert (leader.text, refused.text) == ("b:1 leads", "refused: old")
    (none,) = watch.turn(Seen(refused={"old": 4}))
    assert none.severity is Severity.CRITICAL and "b:1" in none.text
    assert watch.turn(Seen(leading=True, refused={"old": 4})) == []  # it says so itself


@pytest.mark.parametrize("salt", ["user-4711", "#abc", "(others)", "\ud800", "x" * 128])
def test_a_salt_without_a_policy_is_a_hash(salt: str) -> None:
    assert salt not in shown(salt, named=False) and shown(salt, named=False).startswith("#")
    assert len(shown(salt, named=False)) == 13


def test_a_salt_with_a_policy_is_an_operators_word_unless_it_looks_like_ours() -> None:
    assert shown("team-a", named=True) == "team-a" and shown("", named=True) == "(empty)"
    assert shown("#123456789abc", named=True) != "#123456789abc" and shown("(empty)", named=True) != "(empty)"

"""Which nodes a running pool has, asked of masters that may have just started."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstrata.cli.replay import roster
from kvstrata.cli.replay.roster import Roster
from kvstrata.proto import control_pb2 as control


class Answers:
    """What masters say of themselves and their nodes, question by question; the last answer stays."""

    def __init__(self, *answers: tuple[bool, int]) -> None:
        self.left = list(answers)
        self.asked = 0

    def __call__(self, masters: str) -> Answers:
        return self

    def __enter__(self) -> Answers:
        self.asked += 1
        self.ready, self.count = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def health(self) -> control.HealthReport:
        return control.HealthReport(ready=self.ready, uptime_seconds=3.0)

    def nodes(self) -> list[control.NodeRow]:
        rows = [control.NodeRow(node_id=str(n), state="active", incarnation=1, dram_bytes=9) for n in range(self.count)]
        return [*rows, control.NodeRow(node_id="leaving", state="draining")]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answers]:
    def give(*those: tuple[bool, int]) -> Answers:
        given = Answers(*those)
        monkeypatch.setattr(roster, "AdminClient", given)
        return given

    return give


def test_masters_that_do_not_know_their_nodes_yet_are_asked_again(answers: Callable[..., Answers]) -> None:
    given = answers((False, 0), (False, 1), (True, 2))
    assert Roster.settled_of("a:1,b:1", 30.0).nodes == {"0": (1, 9), "1": (1, 9)}
    assert given.asked == 3


def test_a_pool_that_has_no_nodes_is_not_waited_for(answers: Callable[..., Answers]) -> None:
    given = answers((True, 0))
    assert Roster.settled_of("a:1", 30.0).nodes == {} and given.asked == 1


def test_the_wait_ends(answers: Callable[..., Answers]) -> None:
    given = answers((False, 0))
    assert Roster.settled_of("a:1", 0.2).nodes == {} and given.asked > 1


def test_only_where_there_is_one_master_its_restart_is_a_loss(answers: Callable[..., Answers]) -> None:
    given = answers((True, 1))
    alone, one_of_two = Roster.of("a:1"), Roster.of("a:1,b:1")
    given.health = lambda: control.HealthReport(ready=True, uptime_seconds=-60.0)  # type: ignore[method-assign]
    assert alone.losses("a:1") == ["the master at a:1 was restarted"]
    assert one_of_two.losses("a:1,b:1") == []
    given.count, given.left = 0, [(True, 0)]
    assert one_of_two.losses("a:1,b:1") == ["node 0 is no longer active"]

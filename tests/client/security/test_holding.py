"""The life of a client's ticket, and the loop that fetches it: no clock, no socket."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.client.security.credentials import Credentials
from kvstrata.client.security.fetched import FetchedTickets
from kvstrata.client.security.holding import REFUSED_MAX_S, REFUSED_MIN_S, RETRY_MAX_S, RETRY_MIN_S, Holding
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ConfigError, InvalidArgument, KVError, Unauthenticated, Unavailable
from kvstrata.transfer.security.rights import Rights, Role
from kvstrata.transfer.security.tickets import TicketKeys, issue

KEYS = TicketKeys.parse("k:" + "5a" * 32)
WHO = Rights("engines", Role.CLIENT, ("*",), ("*",))
SHOWN = Credentials(token="kvs_" + "x" * 43)


def ticket(life_s: float = 600.0, now: float = 1e9) -> pb.Ticket:
    return issue(KEYS, WHO, now, life_s)


def said(tickets: FetchedTickets) -> list[str]:
    """Problems of tickets; the loop of a source that was not started is one of its own."""
    return [problem for problem in tickets.problems() if problem.startswith("tickets:")]


# ---------------------------------------------------------------- the state


def test_a_fresh_ticket_is_due_at_half_of_its_life_and_good_until_its_end() -> None:
    holding = Holding()
    assert holding.due(0.0) and not holding.good(0.0)
    holding.take(ticket(), 100.0)
    assert not holding.due(399.9) and holding.due(400.0)
    assert holding.good(699.9) and not holding.good(700.0)


def test_clocks_that_differ_do_not_matter() -> None:
    holding = Holding()
    holding.take(ticket(now=1.0), 5000.0)  # the master's clock is decades behind
    assert holding.good(5000.0 + 599)


def test_the_old_ticket_is_kept_while_no_new_one_comes() -> None:
    holding = Holding()
    old = ticket()
    holding.take(old, 0.0)
    holding.fail(Unavailable("away"), 300.0)
    assert holding.ticket is old and holding.good(599.0) and not holding.due(300.0)
    assert holding.due(300.0 + RETRY_MIN_S)


def test_a_refused_ticket_is_due_at_once_but_for_one_that_came_meanwhile() -> None:
    holding = Holding()
    old = ticket()
    holding.take(old, 0.0)
    holding.refused(old, 10.0)
    assert holding.due(10.0)
    holding.take(ticket(), 10.0)
    holding.refused(old, 11.0)
    assert not holding.due(11.0)


def test_who_takes_no_ticket_does_not_have_them_fetched_without_end() -> None:
    holding, fetched = Holding(), []
    for at in range(600):
        if holding.due(float(at)):
            holding.take(ticket(), float(at))
            fetched.append(at)
        assert holding.ticket is not None
        holding.refused(holding.ticket, float(at))
    assert fetched == [0, 1, 30, 90, 210, 450]
    holding.take(ticket(), 600.0)
    holding.take(ticket(), 2000.0)
    assert holding.ticket is not None
    holding.refused(holding.ticket, 2001.0)
    assert holding.due(2001.0), "it was long ago"
    holding.take(ticket(), 2001.0)
    holding.refused(holding.ticket, 2002.0)
    assert not holding.due(2030.0) and holding.due(2001.0 + REFUSED_MIN_S)


@pytest.mark.parametrize("claims", [b"", b"\xff\xff", pb.TicketClaims(issued_ms=2, expires_ms=1).SerializeToString()])
def test_nonsense_is_no_ticket(claims: bytes) -> None:
    with pytest.raises(Unavailable, match="no ticket"):
        Holding().take(pb.Ticket(claims=claims, secret=b"s"), 0.0)


@given(st.lists(st.tuples(st.sampled_from(["take", "fail", "refused"]), st.floats(0, 1000)), max_size=30))
def test_any_order_of_events_keeps_it_whole(events: list[tuple[str, float]]) -> None:
    holding, now = Holding(), 0.0
    for what, passes_s in events:
        now += passes_s
        if what == "take":
            holding.take(ticket(), now)
            assert holding.problem is None
        elif what == "fail":
            before = holding.ticket
            holding.fail(Unavailable("away"), now)
            assert holding.ticket is before and not holding.due(now) and holding.due(now + RETRY_MAX_S)
        elif holding.ticket is not None:
            holding.refused(holding.ticket, now)
            assert holding.due(now + REFUSED_MAX_S) or holding.problem is not None
        holding.check()


# ---------------------------------------------------------------- the loop


class Masters:
    """What each address answers."""

    def __init__(self, **answers: pb.Ticket | KVError) -> None:
        self.answers, self.asked = answers, []  # type: ignore[var-annotated]

    def fetch(self, address: str, _: Credentials, __: float) -> pb.Ticket:
        self.asked.append(address)
        answer = self.answers[address]
        if isinstance(answer, KVError):
            raise answer
        return answer


def source(masters: Masters) -> FetchedTickets:
    return FetchedTickets(tuple(masters.answers), SHOWN, fetch=masters.fetch)


def test_every_master_is_tried_until_one_gives() -> None:
    masters = Masters(a=Unavailable("away"), b=Unauthenticated("no"), c=ticket())
    tickets = source(masters)
    tickets.turn()
    assert tickets.current() is masters.answers["c"] and tickets.current() is tickets.current()
    assert masters.asked == ["a", "b", "c"] and not said(tickets)
    tickets.turn()
    assert len(masters.asked) == 3, "it is not due"


def test_the_loop_rests_until_the_next_ticket_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("kvstrata.client.security.fetched.time", SimpleNamespace(monotonic=lambda: now))
    masters = Masters(a=Unavailable("away"))
    tickets = source(masters)
    assert tickets.turn() == RETRY_MIN_S
    masters.answers["a"] = ticket(life_s=600.0)
    now += RETRY_MIN_S
    assert tickets.turn() == 300.0
    now += 100.0
    assert tickets.turn() == 200.0
    tickets.refused(tickets.current())
    assert tickets.turn() == 300.0 and len(masters.asked) == 3


def test_a_ticket_that_was_refused_ends_the_rest() -> None:
    again = threading.Event()

    def fetch(*_: object) -> pb.Ticket:
        if tickets.health()["fetched"]:
            again.set()
        return ticket()

    tickets = FetchedTickets(("a",), SHOWN, fetch=fetch)
    with tickets.start():
        tickets.refused(tickets.current())
        assert again.wait(10.0)


def test_a_refusal_says_more_than_a_silence() -> None:
    tickets = source(Masters(a=Unauthenticated("unknown token"), b=Unavailable("away")))
    tickets.turn()
    with pytest.raises(Unauthenticated, match="unknown token"):
        tickets.current()
    assert said(tickets) == ["tickets: unknown token"]


def test_masters_that_are_away_are_no_refusal() -> None:
    tickets = source(Masters(a=Unavailable("away")))
    tickets.turn()
    with pytest.raises(Unavailable, match="away"):
        tickets.current()


def test_a_call_goes_on_with_the_old_ticket_and_then_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("kvstrata.client.security.fetched.time", SimpleNamespace(monotonic=lambda: now))
    masters = Masters(a=ticket(life_s=60.0))
    tickets = source(masters)
    tickets.turn()
    masters.answers["a"] = Unavailable("away")
    now += 30.0
    tickets.turn()
    assert masters.asked == ["a", "a"] and tickets.current() is not None
    now += 30.0
    with pytest.raises(Unavailable, match="away"):
        tickets.current()
    assert said(tickets) == ["tickets: away"]


def test_the_first_call_waits_for_the_loop_and_close_ends_it() -> None:
    with source(Masters(a=ticket())).start() as tickets:
        assert tickets.current().secret
        told = tickets.health()
        assert (told["subject"], told["role"], told["problem"]) == ("engines", "client", "")
    assert tickets.loop.problem() == ""


# ---------------------------------------------------------------- credentials


def test_what_is_said_goes_before_the_environment() -> None:
    env = {"KVSTRATA_TOKEN_FILE": "/f", "KVSTRATA_TOKEN": "kvs_e", "KVSTRATA_CA": "/ca"}
    assert Credentials.given(environment=env) == Credentials(token_file=Path("/f"), ca=Path("/ca"))
    assert Credentials.given("kvs_own", environment=env).token == "kvs_own"
    assert Credentials.given(environment={"KVSTRATA_TOKEN": "kvs_e"}).token == "kvs_e"
    assert not Credentials.given(environment={}).identifies


@pytest.mark.parametrize(
    "given_",
    [{"token": "a", "token_file": "/b"}, {"tls_cert": "/c"}, {"tls_key": "/k"}, {"tls_cert": "/c", "tls_key": "/k"}],
)
def test_what_does_not_go_together_is_refused(given_: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        Credentials.given(**given_, environment={})  # type: ignore[arg-type]


def test_a_token_does_not_leave_the_host_without_tls() -> None:
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/x"):
        SHOWN.check_way(address)
    for address in ("10.0.0.1:1", "master:1", "0.0.0.0:1", "127.0.0.1.example.com:1"):
        with pytest.raises(Unauthenticated, match="without TLS"):
            SHOWN.check_way(address)
        Credentials(token=SHOWN.token, insecure=True).check_way(address)
        Credentials(token=SHOWN.token, ca=Path("/ca")).check_way(address)


def test_secrets_are_not_shown() -> None:
    assert SHOWN.token not in repr(SHOWN) and "token=" not in repr(SHOWN)


def test_a_token_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "token"
    shown = Credentials(token_file=path)
    with pytest.raises(ConfigError, match="cannot read"):
        shown.bearer()
    for text in ("kvs_1\n", "kvs_2"):
        path.write_text(text)
        assert shown.bearer() == {"authorization": f"Bearer {text.strip()}"}
    for bad in ("", "two words", "x" * 5000, "a\nb"):
        path.write_text(bad)
        with pytest.raises(Unauthenticated) as refused:
            shown.bearer()
        assert not bad or bad not in str(refused.value)

"""The admin client of several masters: questions to any, changes to the leader, errors that say what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest

from kvstrata.client.admin import AdminClient
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc
from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.server import ChannelServer

POLICY = control.TenantPolicy(salt="t")


class FakeAdmin(control_pb2_grpc.MasterServicer):
    """A master that answers what the tests ask. ``leader``: whom it names as the leader; it leads if None."""

    def __init__(self, name: str) -> None:
        self.name, self.leader, self.requests, self.calls = name, None, {}, []  # type: ignore[var-annotated]
        self.knows_leader, self.broken = True, ""
        self._loops = Loops()
        self._grpc = grpc.server(futures.ThreadPoolExecutor(2))
        control_pb2_grpc.add_MasterServicer_to_server(self, self._grpc)  # type: ignore[no-untyped-call]
        self._port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        self._channel = ChannelServer({}, self._hello, lambda _: None, self._loops)
        self.address = self._channel.listen_tcp("127.0.0.1:0")

    def _hello(self, _: object) -> pb.HelloOk:
        leader = "" if self.leader is None or not self.knows_leader else self.leader
        return pb.HelloOk(
            role="master", grpc=f"127.0.0.1:{self._port}", leading=self.leader is None, leader=leader, software="fake"
        )

    def _enter(self, call: str, context: grpc.ServicerContext, *, leads: bool = True) -> None:
        self.calls.append(call)
        if self.broken:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.broken)
        if leads and self.leader is not None:
            told = f"the leader is {self.leader}" if self.leader else "there is none now"
            context.abort(grpc.StatusCode.UNAVAILABLE, f"this master does not lead: {told}")

    def Health(self, request: pb.Empty, context: grpc.ServicerContext) -> control.HealthReport:
        self._enter("health", context, leads=False)
        return control.HealthReport(software=self.name)

    def ListNodes(self, request: pb.Empty, context: grpc.ServicerContext) -> control.NodeList:
        self._enter("nodes", context, leads=False)
        return control.NodeList(nodes=[control.NodeRow(node_id=self.name)])

    def SetTenant(self, request: control.TenantSet, context: grpc.ServicerContext) -> control.TenantChanged:
        self._enter("set", context)
        return control.TenantChanged()

    def Explain(self, request: control.ExplainQuery, context: grpc.ServicerContext) -> control.Explanation:
        self._enter("explain", context, leads=False)
        if request.request not in self.requests:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{self.name} knows no {request.request}")
        return control.Explanation(verdict=self.name)

    def stop(self) -> None:
        self._grpc.stop(0).wait(5)
        self._channel.stop(0.1)
        self._loops.stop()


@pytest.fixture
def masters() -> Iterator[list[FakeAdmin]]:
    masters = [FakeAdmin(name) for name in "abc"]
    for master in masters:
        master.leader = masters[2].address
    masters[2].leader = None
    yield masters
    for master in masters:
        master.stop()


@pytest.fixture
def admin(masters: list[FakeAdmin]) -> Iterator[Callable[..., AdminClient]]:
    opened: list[AdminClient] = []

    def connect(*chosen: FakeAdmin | str) -> AdminClient:
        addresses = [master if isinstance(master, str) else master.address for master in chosen or masters]
        opened.append(AdminClient(",".join(addresses), timeout_s=3))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


def closed_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def test_changes_go_to_the_leader_and_own_health_to_the_first(
    admin: Callable[..., AdminClient], masters: list[FakeAdmin]
) -> None:
    client = admin()
    client.set_tenant(POLICY)
    assert client.health().software == "a" and client.address == masters[0].address
    assert [row.node_id for row in client.nodes()] == ["c"], "the leader knows best"
    assert [master.calls for master in masters] == [["health"], [], ["set", "nodes"]]


def test_a_leader_is_found_by_who_names_it(admin: Callable[..., AdminClient], masters: list[FakeAdmin]) -> None:
    masters[0].knows_leader = False  # when it says hello
    client = admin(masters[0])
    client.set_tenant(POLICY)
    client.set_tenant(POLICY)
    assert masters[0].calls == ["set"] and masters[2].calls == ["set", "set"]


def test_a_question_goes_to_the_leader_that_others_name_when_the_first_has_just_started(
    admin: Callable[..., AdminClient], masters: list[FakeAdmin]
) -> None:
    masters[0].knows_leader = False
    assert [row.node_id for row in admin().nodes()] == ["c"], "the first knows no nodes yet"
    for master in masters:
        master.leader = ""
    assert [row.node_id for row in admin().nodes()] == ["a"], "nobody leads: any answer is better than none"


def test_without_a_leader_it_says_what_to_do(admin: Callable[..., AdminClient], masters: list[FakeAdmin]) -> None:
    for master in masters:
        master.leader = ""
    with pytest.raises(Unavailable, match="there is none now: try again"):
        admin().set_tenant(POLICY)
    masters[0].leader = dead = closed_port()
    with pytest.raises(Unavailable, match=dead):
        admin(masters[0]).set_tenant(POLICY)


def test_a_change_that_may_have_been_made_is_not_made_twice(
    admin: Callable[..., AdminClient], masters: list[FakeAdmin]
) -> None:
    client = admin()
    named = f"this master does not lead: the leader is {masters[1].address}"
    masters[2].broken = f"deposed before all nodes had confirmed; {named}"
    with pytest.raises(Unavailable, match="deposed"):
        client.set_tenant(POLICY)
    assert masters[1].calls == []


def test_a_question_goes_to_the_next_when_one_does_not_answer(
    admin: Callable[..., AdminClient], masters: list[FakeAdmin]
) -> None:
    client = admin()
    masters[2].stop()
    assert [row.node_id for row in client.nodes()] == ["a"]
    masters[0].broken = "out of order"
    assert [row.node_id for row in client.nodes()] == ["b"]
    masters[1].broken = "closed for good"
    with pytest.raises(Unavailable, match=r"out of order.*closed for good"):
        client.nodes()


def test_dead_masters_are_passed_over_and_named_when_there_is_no_other(
    admin: Callable[..., AdminClient], masters: list[FakeAdmin]
) -> None:
    dead, gone = closed_port(), closed_port()
    assert admin(dead, masters[1]).health().software == "b"
    with pytest.raises(Unavailable) as caught:
        admin(dead, gone)
    assert dead in str(caught.value) and gone in str(caught.value)


def test_a_request_is_explained_by_the_master_that_was_asked(
    admin: Callable[..., AdminClient], masters: list[FakeAdmin]
) -> None:
    masters[1].requests["r-1"] = True
    client = admin()
    assert client.explain(request="r-1").verdict == "b"
    with pytest.raises(InvalidArgument, match="knows no r-2"):
        client.explain(request="r-2")

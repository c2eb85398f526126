"""Who may call what: every rpc and every route of a master, by every role, over real sockets."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from starlette.routing import Route

from kvstrata.master.access import ROUTES, RPCS
from kvstrata.master.daemon import Master, MasterConfig
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc, wire
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.security import grpc_security, watched_file
from kvstrata.transfer.security.files import SecurityFiles
from kvstrata.transfer.security.grpc_security import open_channel
from kvstrata.transfer.security.rights import Role
from kvstrata.transfer.security.ticket_route import Paces
from kvstrata.transfer.security.tickets import LIFE_S
from kvstrata.transfer.security.tokens import digest, new_token
from tests.waiting import until

ANY = "127.0.0.1:0"
CALL_S = 5.0
#: A stream may stand this long after its token is gone; it is seconds.
ENDED_S = 30.0
NS = Namespace("model", 1 << 20, 16)
REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
READERS = {"read", "operate", "admin"}
ALLOWED: dict[str, set[str]] = {
    "Sync": {"node"},
    "LookupBlocks": {"client", "node", "admin"},
    "PlaceBlocks": {"client", "node", "admin"},
    "RemoveBlocks": {"client", "node", "admin"},
    "ListNodes": READERS,
    "ListClients": READERS,
    "ListNamespaces": READERS,
    "ListMasters": READERS,
    "ListReplicas": READERS,
    "ListTenants": READERS,
    "ListBlocks": READERS,
    "Explain": READERS,
    "Health": READERS,
    "WatchIndex": READERS,
    "Route": READERS,
    "SetTenant": {"operate", "admin"},
    "SetReplicas": {"operate", "admin"},
    "DrainNode": {"operate", "admin"},
    "RemoveTenant": {"operate", "admin"},
    "BumpEpoch": {"admin"},
    "DropBlocks": {"admin"},
    "RemoveNode": {"admin"},
}
_SERVICE = control.DESCRIPTOR.services_by_name["Master"]


class Showing:
    """A stub whose calls all have the same metadata."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub = stub
        self._metadata = metadata

    def __getattr__(self, rpc: str) -> Any:
        return partial(getattr(self._stub, rpc), metadata=self._metadata)


class Secured:
    """A master with a token a role, ``narrow`` ones of some tenants, and ``resets``, a client that may reset."""

    def __init__(self, folder: Path) -> None:
        self.tokens = {name: new_token() for name in (*Role, "narrow-read", "narrow-client", "resets")}
        rows: list[dict[str, Any]] = [
            {"name": role.value, "sha256": digest(self.tokens[role]), "role": role.value, "salts": ["*"]}
            for role in Role
        ]
        for name, role in (("narrow-read", "read"), ("narrow-client", "client"), ("resets", "client")):
            rows.append({"name": name, "sha256": digest(self.tokens[name]), "role": role, "salts": ["mine-*"]})
        rows[-1] |= {"reset": True, "groups": ["model*"]}
        self.file = folder / "tokens"
        self.file.write_text(yaml.safe_dump(rows))
        self.keys = folder / "keys"
        self.keys.write_text(f"first:{os.urandom(32).hex()}\n")
        self.keys.chmod(0o600)
        files = SecurityFiles(tokens=self.file, ticket_keys=self.keys)
        self.master = Master(MasterConfig(ANY, ANY, ANY, None, seed=1, security=files))
        self._channels: list[grpc.Channel] = []
        self._http = httpx.Client(base_url=f"http://{self.master.endpoints.http}", timeout=CALL_S)

    def stub(self, name: str | None) -> Any:
        self._channels.append(open_channel(self.master.endpoints.grpc))
        shown = () if name is None else (("authorization", f"Bearer {self.tokens.get(name, name)}"),)
        return Showing(control_pb2_grpc.MasterStub(self._channels[-1]), shown)

    def http(self, method: str, path: str, name: str | None = None, **more: Any) -> httpx.Response:
        headers = {} if name is None else {"authorization": f"Bearer {self.tokens.get(name, name)}"}
        return self._http.request(method, path, headers=headers, **more)

    def close(self) -> None:
        self._http.close()
        for channel in self._channels:
            channel.close()
        self.master.stop()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    running = Secured(tmp_path_factory.mktemp("secured"))
    yield running
    running.close()


def code_of(stub: Any, rpc: str, request: Any = None) -> grpc.StatusCode:
    """How a call ends; one that streams, at its first message."""
    method = _SERVICE.methods_by_name[rpc]
    asked = request or (pb.Empty if method.input_type.name == "Empty" else getattr(control, method.input_type.name))()
    try:
        if method.client_streaming:
            asked = iter([asked])
        answer = getattr(stub, rpc)(asked, timeout=CALL_S)
        if method.server_streaming:
            next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return error.code()
    return grpc.StatusCode.OK


def test_every_rpc_has_a_rule_and_is_tried_here() -> None:
    served = {method.name for method in _SERVICE.methods}
    assert served == set(RPCS), "say in master/access.py who may call it"
    assert served == set(ALLOWED), "and here"


@pytest.mark.parametrize("rpc", sorted(ALLOWED))
def test_who_may_call_an_rpc(secured: Secured, rpc: str) -> None:
    assert code_of(secured.stub(None), rpc) is grpc.StatusCode.UNAUTHENTICATED
    assert code_of(secured.stub(new_token()), rpc) is grpc.StatusCode.UNAUTHENTICATED
    ends = {role.value: code_of(secured.stub(role), rpc) for role in Role}
    assert {role for role, code in ends.items() if code not in REFUSED} == ALLOWED[rpc], ends
    assert all(ends[role] is grpc.StatusCode.PERMISSION_DENIED for role in set(Role) - ALLOWED[rpc])


def test_every_route_has_a_rule(secured: Secured) -> None:
    app = secured.master.web_application
    served = set()
    for route in app.routes:
        assert isinstance(route, Route)
        part = route.path.removeprefix("/").partition("/")[0]
        served |= {(method, part) for method in route.methods or () if method != "HEAD"}
    assert served == set(ROUTES), "say in master/access.py who may ask it"


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("GET", "/metrics", READERS),
        ("GET", "/quota", READERS),
        ("GET", "/quota/x", READERS),
        ("PUT", "/quota/x", {"operate", "admin"}),
        ("DELETE", "/quota/x", {"operate", "admin"}),
        ("GET", "/status.json", READERS),
        ("GET", "/events.json", READERS),
        ("POST", "/ticket", set(Role)),
        ("GET", "/healthz", set(Role)),
        ("GET", "/readyz", set(Role)),
        ("GET", "/", set(Role)),
    ],
)
def test_who_may_ask_a_route(secured: Secured, method: str, path: str, allowed: set[str]) -> None:
    refused = secured.http(method, path, new_token())
    assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Bearer")
    anonymous = secured.http(method, path).status_code
    assert anonymous == (200 if path in ("/healthz", "/readyz", "/") else 401)
    body = {"content": b'{"limit_gb": 1}'} if method == "PUT" else {}
    codes = {role.value: secured.http(method, path, role, **body).status_code for role in Role}
    assert {role for role, code in codes.items() if code != 403} == allowed, codes


def test_other_methods_and_paths_are_not_there(secured: Secured) -> None:
    wrong = secured.http("POST", "/metrics", "admin")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET") and "GET only" in wrong.json()["error"]
    assert secured.http("GET", "/nothing", "admin").status_code == 404
    assert secured.http("GET", "/nothing").status_code == 401
    for path in (b"/../metrics", b"//metrics", b"/%6detrics", b"/metrics/", b"/metrics?x"):
        assert raw_status(secured.master.endpoints.http, path) == 401, path
    assert secured.http("HEAD", "/metrics").status_code == 401


def raw_status(address: str, path: bytes) -> int:
    """Of a request whose path nobody has made tidy."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), CALL_S) as sock:
        sock.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return int(sock.recv(4096).split()[1])


def test_keys_that_went_bad_make_a_master_unhealthy(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    good = secured.keys.read_text()

    def told() -> dict[str, Any]:
        return dict(secured.http("GET", "/healthz", "read").json())

    secured.keys.write_text("nonsense")
    try:
        until(lambda: [str(secured.keys) in each for each in told()["problems"]] == [True])
    finally:
        secured.keys.write_text(good)
    until(lambda: told()["healthy"])


def test_health_tells_who_shows_nothing_its_state_alone(secured: Secured) -> None:
    assert secured.http("GET", "/healthz").json() == {"healthy": True}
    assert secured.http("GET", "/healthz", "client").json() == {"healthy": True}
    told = secured.http("GET", "/healthz", "read").json()
    assert told["security"] == {
        "tokens": True,
        "tickets": True,
        "tls": False,
        "client_certs": False,
        "certificate_days_left": None,
    }
    assert told["warnings"] == [] and told["cluster_id"]


def test_who_may_touch_some_tenants_touches_no_others(secured: Secured) -> None:
    mine, others, all_salts = "mine-1", "yours", {"any_salt": True}
    spec = NS.to_spec()
    reads = [
        ("ListBlocks", control.BlockQuery(group="g", salt=mine), True),
        ("ListBlocks", control.BlockQuery(group="g", salt=others), False),
        ("ListBlocks", control.BlockQuery(group="g", **all_salts), False),
        ("ListTenants", control.TenantQuery(salts=[mine]), True),
        ("ListTenants", control.TenantQuery(salts=[mine, others]), False),
        ("ListTenants", control.TenantQuery(), False),
        ("Explain", control.ExplainQuery(hash=bytes(16), salt=mine), True),
        ("Explain", control.ExplainQuery(hash=bytes(16)), False),
        ("Explain", control.ExplainQuery(request="r", salt=mine), False),
    ]
    calls = [
        (rpc, kind(spec=spec, salt=salt, hashes=bytes(16)), salt == mine)
        for rpc, kind in (
            ("LookupBlocks", control.NamedLookup),
            ("PlaceBlocks", control.NamedPlace),
            ("RemoveBlocks", control.NamedRemove),
        )
        for salt in (mine, others)
    ]
    for name, tried in (("narrow-read", reads), ("narrow-client", calls)):
        stub = secured.stub(name)
        for rpc, request, fine in tried:
            assert (code_of(stub, rpc, request) not in REFUSED) == fine, (rpc, request)
    assert secured.http("GET", "/quota/mine-1", "narrow-read").status_code in (200, 404)
    assert secured.http("GET", "/quota/yours", "narrow-read").status_code == 403
    assert secured.http("GET", "/quota", "narrow-read").status_code == 403


def test_a_client_resets_its_own_groups_where_its_token_says_so(secured: Secured) -> None:
    group = control.GroupName(group="model-1", deadline_ms=100)
    assert code_of(secured.stub("resets"), "BumpEpoch", group) not in REFUSED
    assert code_of(secured.stub("client"), "BumpEpoch", group) is grpc.StatusCode.PERMISSION_DENIED
    other = control.GroupName(group="other", deadline_ms=100)
    assert code_of(secured.stub("resets"), "BumpEpoch", other) is grpc.StatusCode.PERMISSION_DENIED
    assert code_of(secured.stub("resets"), "DropBlocks") is grpc.StatusCode.PERMISSION_DENIED


def test_removing_a_tenant_with_its_blocks_takes_an_admin(secured: Secured) -> None:
    drop = control.TenantRemove(salt="x", drop_blocks=True)
    assert code_of(secured.stub("operate"), "RemoveTenant", drop) is grpc.StatusCode.PERMISSION_DENIED
    assert code_of(secured.stub("admin"), "RemoveTenant", drop) not in REFUSED


def test_a_ticket_says_what_its_token_may(secured: Secured) -> None:
    answer = secured.http("POST", "/ticket", "narrow-client")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-protobuf")
    assert answer.headers["cache-control"] == "no-store"
    claims = pb.TicketClaims.FromString(pb.Ticket.FromString(answer.content).claims)
    assert (claims.subject, claims.role, list(claims.salts), list(claims.groups)) == (
        "narrow-client",
        "client",
        ["mine-*"],
        ["*"],
    )
    assert claims.expires_ms - claims.issued_ms == LIFE_S * 1e3


@pytest.mark.parametrize("rpc, role", [("WatchIndex", "read"), ("Sync", "node")])
@pytest.mark.parametrize("change", ["removed", "narrowed"])
def test_a_stream_that_stands_ends_with_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rpc: str, role: str, change: str
) -> None:
    monkeypatch.setattr(grpc_security, "SPREAD_S", 0.2)
    secured = Secured(tmp_path)
    sent: queue.SimpleQueue[control.NodeMessage | None] = queue.SimpleQueue()
    try:
        attach = control.Attach(node_id="a", incarnation=1, channel="127.0.0.1:9", protocol=wire.PROTOCOL)
        sent.put(control.NodeMessage(attach=attach))
        asked = control.IndexQuery() if rpc == "WatchIndex" else iter(sent.get, None)
        stream = getattr(secured.stub(role), rpc)(asked, timeout=ENDED_S)
        next(stream)
        rows = yaml.safe_load(secured.file.read_text())
        (mine,) = (row for row in rows if row["name"] == role)
        if change == "narrowed":
            mine["salts"] = ["mine-*"]
        secured.file.write_text(yaml.safe_dump(rows if change == "narrowed" else [r for r in rows if r is not mine]))
        with pytest.raises(grpc.RpcError) as ended:
            for _ in stream:
                pass
        assert isinstance(ended.value, grpc.Call) and ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert ("has changed" if change == "narrowed" else "not good here") in (ended.value.details() or "")
        assert code_of(secured.stub("read" if role == "node" else "operate"), "Health") is grpc.StatusCode.OK
    finally:
        sent.put(None)
        secured.close()


def test_tickets_are_not_given_without_end_to_one_address() -> None:
    paces = Paces(per_s=2.0, burst=3)
    assert [paces.take("a", 10.0) for _ in range(4)] == [True, True, True, False]
    assert paces.take("b", 10.0) and not paces.take("a", 10.4) and paces.take("a", 11.0)
    for number in range(5000):
        paces.take(str(number), 11.0)
    assert len(paces._accounts) == 4096


def test_refusals_are_counted_and_nothing_secret_is_told(secured: Secured) -> None:
    secured.http("GET", "/metrics")
    text = secured.http("GET", "/metrics", "read").text
    refused = [line for line in text.splitlines() if line.startswith('kvstrata_master_auth_refused_total{reason="no_t')]
    assert float(refused[0].rpartition(" ")[2]) >= 1
    told = text + secured.http("GET", "/healthz", "read").text + secured.http("GET", "/status.json", "admin").text
    for token in secured.tokens.values():
        assert token not in told and digest(token) not in told

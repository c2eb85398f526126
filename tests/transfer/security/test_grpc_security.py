"""The guard of gRPC: it refuses before anything of a stranger's call is read, and tells handlers who asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextvars import Context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import yaml

from kvstrata.proto.errors import Unauthenticated
from kvstrata.transfer.security import grpc_security
from kvstrata.transfer.security.access import CALLER, Access, Gate
from kvstrata.transfer.security.grpc_security import Guard, open_channel, server_credentials
from kvstrata.transfer.security.rights import EVERYTHING, Role
from kvstrata.transfer.security.tls import ServerTls
from kvstrata.transfer.security.tokens import TokenFile, digest, new_token
from tests.certificates import Authority

CALL_S = 10.0
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Served:
    """A service with one method of each kind, that answer with who asked; ``read`` are the requests decoded."""

    def __init__(self, guard: Guard | None, credentials: grpc.ServerCredentials | None = None) -> None:
        self.read: list[bytes] = []
        self.server = grpc.server(futures.ThreadPoolExecutor(8), interceptors=[guard] if guard else [])
        handlers = {
            kind: getattr(grpc, f"{kind}_rpc_method_handler")(self._handler(kind), self._decode) for kind in KINDS
        }
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Test", handlers)])
        address = "127.0.0.1:0"
        port = (
            self.server.add_secure_port(address, credentials) if credentials else self.server.add_insecure_port(address)
        )
        self.address = f"127.0.0.1:{port}"
        self.server.start()

    def _decode(self, data: bytes) -> bytes:
        self.read.append(data)
        return data

    @staticmethod
    def _handler(kind: str) -> Callable[[Any, Any], Any]:
        def one(request: Any, context: Any) -> bytes:
            if kind.startswith("stream"):
                assert list(request) == [b"salt"]
            return CALLER.get().subject.encode()

        def many(request: Any, context: Any) -> Iterator[bytes]:
            yield one(request, context)
            yield CALLER.get().subject.encode()

        return many if kind.endswith("stream") else one


@pytest.fixture
def tokens() -> dict[str, str]:
    return {"reader": new_token(), "engine": new_token()}


@pytest.fixture
def gate(tmp_path: Path, tokens: dict[str, str]) -> Gate:
    roles = {"reader": "read", "engine": "client"}
    rows = [{"name": n, "sha256": digest(t), "role": roles[n], "salts": ["sal?"]} for n, t in tokens.items()]
    rows.append({"name": "certified", "certificate": "somebody", "role": "read"})
    (tmp_path / "tokens").write_text(yaml.safe_dump(rows))
    return Gate(TokenFile(tmp_path / "tokens"))


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    ends: list[Callable[[], Any]] = []

    def keep(thing: Any) -> Any:
        ends.append(thing.close if isinstance(thing, grpc.Channel) else lambda: thing.server.stop(0).wait(5))
        return thing

    yield keep
    for end in reversed(ends):
        end()


def answers(channel: grpc.Channel, kind: str, token: str | None = None, request: bytes = b"salt") -> list[bytes]:
    asked: Any = iter([request]) if kind.startswith("stream") else request
    shown = () if token is None else (("authorization", f"Bearer {token}"),)
    said = getattr(channel, kind)(f"/Test/{kind}")(asked, timeout=CALL_S, metadata=shown)
    return list(said) if kind.endswith("stream") else [said]


def code(channel: grpc.Channel, kind: str, token: str | None = None, request: bytes = b"salt") -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        answers(channel, kind, token, request)
    assert isinstance(refused.value, grpc.Call)
    return refused.value.code()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_call_is_guarded(gate: Gate, tokens: dict[str, str], closing: Any, kind: str) -> None:
    rules = {each: Access(Role.READ, lambda rights, request: rights.touch_salt(request.decode())) for each in KINDS}
    served = closing(Served(Guard(gate, rules)))
    channel = closing(open_channel(served.address))
    assert answers(channel, kind, tokens["reader"]) == [b"reader"] * (2 if kind.endswith("stream") else 1)
    del served.read[:]
    assert code(channel, kind, tokens["engine"]) is grpc.StatusCode.PERMISSION_DENIED
    assert code(channel, kind, new_token()) is grpc.StatusCode.UNAUTHENTICATED
    assert served.read == [], "nothing of it was read"
    if kind.startswith("unary"):
        assert code(channel, kind, tokens["reader"], b"other") is grpc.StatusCode.PERMISSION_DENIED


def test_a_call_without_a_rule_is_refused_to_everybody(gate: Gate, tokens: dict[str, str], closing: Any) -> None:
    served = closing(Served(Guard(gate, {})))
    channel = closing(open_channel(served.address))
    assert code(channel, "unary_unary", tokens["reader"]) is grpc.StatusCode.PERMISSION_DENIED


def test_without_a_guard_everybody_has_all_rights(closing: Any) -> None:
    served = closing(Served(None))
    assert answers(closing(open_channel(served.address)), "unary_unary") == [b""]
    assert Context().run(CALLER.get) is EVERYTHING


def test_each_call_of_a_channel_has_the_rights_of_its_own_token(
    gate: Gate, tokens: dict[str, str], closing: Any
) -> None:
    served = closing(Served(Guard(gate, {"unary_unary": Access(None)})))
    channel = closing(open_channel(served.address))
    assert answers(channel, "unary_unary", tokens["reader"]) == [b"reader"]
    assert answers(channel, "unary_unary", tokens["engine"]) == [b"engine"]


def test_a_certificate_stands_for_a_token_and_a_token_for_itself(
    gate: Gate, tokens: dict[str, str], closing: Any, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "pki")
    own, mine, other = (authority.pair(name) for name in ("server", "somebody", "nobody"))
    tls = ServerTls(own.cert, own.key, authority.ca, client_certs=True)
    served = closing(Served(Guard(gate, {"unary_unary": Access(Role.READ)}), server_credentials(tls)))

    def channel(pair: Any, named: str = "") -> grpc.Channel:
        return closing(open_channel(served.address, ca=authority.ca, cert=pair.cert, key=pair.key, named=named))

    assert answers(channel(mine), "unary_unary") == [b"certified"]
    assert answers(channel(mine), "unary_unary", tokens["reader"]) == [b"reader"]
    assert answers(channel(other), "unary_unary", tokens["reader"]) == [b"reader"]
    assert answers(channel(mine, named="localhost"), "unary_unary") == [b"certified"]
    assert code(channel(other), "unary_unary") is grpc.StatusCode.UNAUTHENTICATED
    assert code(channel(mine), "unary_unary", new_token()) is grpc.StatusCode.UNAUTHENTICATED
    assert code(channel(mine, named="elsewhere"), "unary_unary") is grpc.StatusCode.UNAVAILABLE


def test_streams_whose_token_is_gone_do_not_all_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, gone = [100.0], [True]
    monkeypatch.setattr(grpc_security, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def check() -> None:
        if gone[0]:
            raise Unauthenticated("gone")

    def ended(stands: list[grpc_security._Standing]) -> int:
        count = 0
        for stand in stands:
            try:
                stand()
            except Unauthenticated:
                count += 1
        return count

    stands = [grpc_security._Standing(check) for _ in range(100)]
    assert ended(stands) == 0
    now[0] += grpc_security.SPREAD_S / 2
    assert 20 < ended(stands) < 80
    gone[0] = False
    assert ended(stands) == 0
    gone[0] = True
    assert ended(stands) == 0, "it was good again meanwhile"
    now[0] += grpc_security.SPREAD_S
    assert ended(stands) == 100

"""A pool made by `kvstrata auth init`: TLS, tokens and tickets, from files to blocks, and the command line on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Forbidden, ForbiddenSalt, Unauthenticated, Unavailable
from tests.command_line import Done, run
from tests.e2e.real_pool import ANY, READY_S, Daemon, keys, payload
from tests.waiting import until

pytest.importorskip("cryptography")

BLOCK = 4096
COUNT = 8


def arguments_of(arguments: tuple[str, ...], token: Path | None, ca: Path | None) -> list[str]:
    return [*arguments, *(["--token-file", str(token)] if token else []), *(["--ca", str(ca)] if ca else [])]


def cli(*arguments: str, token: Path | None = None, ca: Path | None = None) -> Done:
    """A command, with the credentials of its flags alone."""
    bare: dict[str, str | None] = {name: None for name in os.environ if name.startswith("KVSTRATA_")}
    return run(*arguments_of(arguments, token, ca), env={**bare, "COLUMNS": "240"})


def cli_process(*arguments: str, token: Path | None = None, ca: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("KVSTRATA_")}
    return subprocess.run(
        [sys.executable, "-m", "kvstrata.cli.app", *arguments_of(arguments, token, ca)],
        capture_output=True,
        text=True,
        env=bare,
        timeout=90,
        check=False,
    )


class SecuredPool:
    """A master and two nodes, started with the flags that `auth init` says."""

    def __init__(self, base: Path) -> None:
        self.files = base / "auth"
        made = cli_process("auth", "init", str(self.files), "--host", "127.0.0.1", "--json")
        assert made.returncode == 0, made.stderr
        self.made = made.stdout
        self.flags: dict[str, list[str]] = json.loads(made.stdout)["flags"]
        self.daemons: list[Daemon] = []
        self._base = base
        try:
            self.master = self._start("master", "master", "--listen", ANY, "--grpc", ANY, "--http", ANY)
            self.address = str(self.master.ready["channel"])
            for index in range(2):
                self._start(
                    "storage", f"node{index}", "--master", self.address, "--listen", ANY, "--http", ANY,
                    "--data", str(base / f"node{index}"), "--dram", "64MiB",
                )  # fmt: skip
            with self.admin("read") as admin:
                until(lambda: sum(row.state == "active" for row in admin.nodes()) == 2, READY_S)
        except BaseException:
            self.end()
            raise

    def _start(self, kind: str, name: str, *arguments: str) -> Daemon:
        daemon = Daemon(kind, *arguments, *self.flags[kind], log=self._base / f"{name}.log")
        self.daemons.append(daemon)
        return daemon

    def token(self, name: str) -> Path:
        return self.files / f"{name}.token"

    @property
    def ca(self) -> Path:
        return self.files / "ca.pem"

    def admin(self, name: str) -> AdminClient:
        return AdminClient(self.address, token_file=self.token(name), tls_ca=self.ca)

    def client(self, token: Path, transport: str = "auto") -> Client:
        return Client(self.address, token_file=token, tls_ca=self.ca, transport=transport, transfer_deadline_ms=10_000)

    def give(self, name: str, *options: str) -> Path:
        """A token of its own, in a file of its own."""
        out = self.files / f"{name}.token"
        added = cli("auth", "token", "add", str(self.files / "tokens.yaml"), name, "--out", str(out), *options)
        assert added.returncode == 0, added.stderr
        until(lambda: cli("auth", "ticket", "--master", self.address, token=out, ca=self.ca).returncode == 0, 30)
        return out

    def logs(self) -> str:
        return "".join(path.read_text() for path in self._base.glob("*.log"))

    def secrets(self) -> list[str]:
        tokens = [path.read_text().strip() for path in self.files.glob("*.token")]
        lines = (self.files / "ticket-keys").read_text().splitlines()
        return tokens + [line.partition(":")[2] for line in lines if not line.startswith("#")]

    def end(self) -> None:
        for daemon in self.daemons:
            daemon.end()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredPool]:
    pool = SecuredPool(tmp_path_factory.mktemp("secured"))
    yield pool
    pool.end()


def round_trip(client: Client, chain: str, salt: str = "tenant") -> None:
    """Store, look up, load and compare. A node that a busy machine makes silent is asked again: that is no refusal."""
    namespace = client.namespace("secured/model", block_bytes=BLOCK, block_tokens=16)
    hashes = keys(COUNT, chain)
    data = payload(hashes, salt, BLOCK)
    source, target = client.register(data), client.allocate(data.nbytes)

    def stored() -> bool:
        client.store(namespace, salt, hashes, source.rows(namespace))
        return client.lookup(namespace, salt, hashes).hit_blocks == COUNT

    until(stored, 20)
    until(lambda: bool(client.load(namespace, salt, hashes, target.rows(namespace)).loaded.all()), 20)
    assert (target.bytes.reshape(data.shape) == data).all()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_blocks_go_through_a_pool_that_auth_init_made(pool: SecuredPool, transport: str) -> None:
    with pool.client(pool.token("client"), transport) as client:
        round_trip(client, f"through-{transport}")
        health = client.health()
        assert health["healthy"], health["problems"]
        ticket = health["ticket"]
        assert isinstance(ticket, dict) and ticket["role"] == "client" and ticket["seconds_left"] > 0
        assert "client-tickets" in health["loop_age_seconds"]  # type: ignore[operator]


def test_a_token_touches_its_salts_alone(pool: SecuredPool) -> None:
    own = pool.give("team-a", "--salt", "team-a-*")
    with pool.client(own) as client:
        round_trip(client, "own", "team-a-1")
        namespace = client.namespace("secured/model", block_bytes=BLOCK, block_tokens=16)
        with pytest.raises(ForbiddenSalt):
            client.lookup(namespace, "team-b", keys(COUNT, "own"))
        with pytest.raises(ForbiddenSalt):
            client.store(namespace, "team-b", keys(1), client.allocate(BLOCK).rows(namespace))


def test_nobody_is_served_without_the_right_token(pool: SecuredPool, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.write_text("kvs_" + "A" * 43)
    with pytest.raises(Unauthenticated, match="does not know this token"):
        pool.client(stranger)
    with pytest.raises(Unauthenticated, match="wants a ticket"):
        Client(pool.address)
    with pytest.raises((Unavailable, Unauthenticated)):
        AdminClient(pool.address).health()
    with pytest.raises(Unauthenticated, match="token"):
        AdminClient(pool.address, tls_ca=pool.ca).nodes()
    other = tmp_path / "other"
    assert cli("auth", "init", str(other)).returncode == 0
    with pytest.raises(Unauthenticated, match="certificate"):
        Client(pool.address, token_file=pool.token("client"), tls_ca=other / "ca.pem")


def test_each_role_does_what_it_may(pool: SecuredPool) -> None:
    policy = control.TenantPolicy(salt="t", dram_limit=1 << 20)
    with pool.admin("operate") as operator:
        operator.set_tenant(policy)
        with pytest.raises(Forbidden):
            operator.drop(salt="nobody")
    with pool.admin("read") as reader:
        assert [row.policy.salt for row in reader.list_tenants(["t"]).tenants] == ["t"]
        with pytest.raises(Forbidden, match="operate"):
            reader.set_tenant(policy)
    with pool.admin("admin") as admin:
        admin.drop(salt="nobody")


def test_the_command_line_works_on_it(pool: SecuredPool) -> None:
    at = ("--master", pool.address)
    for command in (
        ("health",),
        ("node", "list"),
        ("node", "check"),
        ("tenant", "set", "quoted", "--dram", "1GiB"),
        ("tenant", "list"),
        ("masters",),
    ):
        way = cli_process if command[0] == "health" else cli
        done = way(*command, *at, token=pool.token("operate"), ca=pool.ca)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    refused = cli("tenant", "set", "quoted", "--dram", "2GiB", *at, token=pool.token("read"), ca=pool.ca)
    assert refused.returncode == 1 and "operate" in refused.stderr
    bare = cli("health", *at, ca=pool.ca)
    assert bare.returncode == 1 and "--token-file" in bare.stderr
    measured = cli(
        "bench", *at, "--rounds", "1", "--blocks", "4", "--size", "64KiB", token=pool.token("admin"), ca=pool.ca
    )
    assert measured.returncode == 0, measured.stderr
    doctor = cli("doctor", "--round-trip", "--json", *at, token=pool.token("admin"), ca=pool.ca)
    rows = {row["what"]: row for row in json.loads(doctor.stdout)["rows"]}
    assert rows[f"{pool.address}: tickets"]["verdict"] == "ok"
    assert rows[f"{pool.address}: gRPC"]["verdict"] == "ok", rows[f"{pool.address}: gRPC"]
    assert rows[f"{pool.address}: certificate"]["verdict"] == "ok"
    tried = [row for what, row in rows.items() if "round trip by" in what]
    assert len(tried) == 4 and all(row["verdict"] == "ok" for row in tried), tried


def test_what_a_ticket_allows_is_shown_without_its_secret(pool: SecuredPool) -> None:
    shown = cli("auth", "ticket", "--json", "--master", pool.address, token=pool.token("read"), ca=pool.ca)
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert (told["subject"], told["role"], told["life_seconds"]) == ("read", "read", 600)
    assert "secret" not in told


def test_a_removed_token_gets_no_new_ticket_and_old_ones_go_on(pool: SecuredPool) -> None:
    leaver = pool.give("leaver")
    with pool.client(leaver) as client:
        round_trip(client, "before")
        assert cli("auth", "token", "remove", str(pool.files / "tokens.yaml"), "leaver").returncode == 0

        def refused() -> bool:
            try:
                pool.client(leaver).close()
            except Unauthenticated:
                return True
            return False

        until(refused)
        round_trip(client, "after")


def test_ticket_keys_rotate_under_calls(pool: SecuredPool) -> None:
    with pool.client(pool.token("client")) as client:
        for step in ("add", "sign"):
            done = cli("auth", "keys", "rotate", str(pool.files / "ticket-keys"), "--step", step)
            assert done.returncode == 0, done.stderr
            new = cli("auth", "keys", "list", str(pool.files / "ticket-keys")).stdout.split()[0]
            until(lambda new=new: _signs(pool) == new, 20)  # type: ignore[misc]
            round_trip(client, f"rotated-{step}")
            with pool.client(pool.token("client")) as fresh:
                round_trip(fresh, f"fresh-{step}")


def _signs(pool: SecuredPool) -> str:
    shown = cli("auth", "ticket", "--json", "--master", pool.address, token=pool.token("read"), ca=pool.ca)
    return str(json.loads(shown.stdout)["key"])


def test_no_secret_is_in_logs_arguments_or_output(pool: SecuredPool) -> None:
    with pool.client(pool.token("client")) as client:
        seen = json.dumps(client.health()) + repr(client) + pool.made + pool.logs()
    for daemon in pool.daemons:
        for name in ("cmdline", "environ"):
            seen += Path(f"/proc/{daemon.process.pid}/{name}").read_bytes().decode(errors="replace")
    assert not [secret for secret in pool.secrets() if secret in seen]


def test_a_client_goes_on_while_its_master_is_away(pool: SecuredPool) -> None:
    """Last of all: the master ends here."""
    with pool.client(pool.token("client"), "tcp") as client:
        round_trip(client, "left")
        namespace = client.namespace("secured/model", block_bytes=BLOCK, block_tokens=16)
        pool.master.end()
        hashes = keys(COUNT, "left")
        target = client.allocate(COUNT * BLOCK)
        result = client.load(namespace, "tenant", hashes, target.rows(namespace))
        assert len(result.loaded) == COUNT  # hits by recent locations, or misses: no error
        assert client.health()["ticket"]["seconds_left"] > 0  # type: ignore[index]

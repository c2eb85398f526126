"""A pool of real daemons that asks for tokens and tickets, on loopback and without TLS; and tokens for its clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from kvstrata.client.admin import AdminClient
from kvstrata.transfer.security.tokens import digest, new_token
from tests.e2e.real_pool import ANY, READY_S, Daemon
from tests.waiting import until

#: name, role, salts, groups
ROWS = (
    ("admin", "admin", ["*"], ["*"]),
    ("node", "node", ["*"], ["*"]),
    ("engine", "client", ["*"], ["*"]),
    ("acme", "client", ["acme-*"], ["model/*"]),
    ("watcher", "read", [], []),
)


def private(path: Path, text: str) -> Path:
    """A file that only its owner may read."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def key_line(name: str) -> str:
    return f"{name}:{name.encode().ljust(32, b'.').hex()}\n"


class TicketPool:
    """A master and ``nodes`` nodes. ``tokens`` by row name; ``keys`` is the file of ticket keys that all have."""

    def __init__(self, base: Path, nodes: int = 2, options: Sequence[str] = ()) -> None:
        self.base = base
        self.tokens = {name: new_token() for name, *_ in ROWS}
        self.keys = private(base / "ticket-keys", key_line("one"))
        rows = [
            {"name": name, "sha256": digest(self.tokens[name]), "role": role, "salts": salts, "groups": groups}
            for name, role, salts, groups in ROWS
        ]
        tokens = private(base / "tokens.yaml", yaml.safe_dump(rows))
        own = private(base / "node-token", self.tokens["node"] + "\n")
        self.daemons: dict[str, Daemon] = {}
        try:
            self.daemons["master"] = Daemon(
                "master", "--listen", ANY, "--grpc", ANY, "--http", ANY, "--state", str(base / "state.db"),
                "--tokens", str(tokens), "--ticket-keys", str(self.keys), log=base / "master.log",
            )  # fmt: skip
            for index in range(nodes):
                self.daemons[f"node{index}"] = Daemon(
                    "storage", "--master", self.address, "--listen", ANY, "--http", ANY,
                    "--data", str(base / f"node{index}"), "--dram", "32MiB", "--tokens", str(tokens),
                    "--ticket-keys", str(self.keys), "--token-file", str(own), *options,
                    log=base / f"node{index}.log",
                )  # fmt: skip
            with AdminClient(self.address, token=self.tokens["admin"]) as admin:
                until(lambda: sum(row.state == "active" for row in admin.nodes()) == nodes, READY_S)
        except BaseException:
            self.end()
            raise

    @property
    def address(self) -> str:
        return str(self.daemons["master"].ready["channel"])

    def nodes(self) -> list[Daemon]:
        return [daemon for name, daemon in self.daemons.items() if name != "master"]

    def write_keys(self, *names: str) -> None:
        """All at once, as secrets are replaced where daemons run."""
        fresh = private(self.base / "ticket-keys.fresh", "".join(map(key_line, names)))
        fresh.replace(self.keys)

    def end(self) -> None:
        for daemon in self.daemons.values():
            daemon.end()

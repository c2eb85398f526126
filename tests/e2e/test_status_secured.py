"""The status page and ``kvstrata top`` with TLS and tokens: who may look, and what is told of who may not."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.master.status.pages import PUBLIC
from kvstrata.proto import control_pb2 as control
from kvstrata.transfer.security.tls import client_context
from tests.command_line import Done, run
from tests.e2e.browser import browser
from tests.e2e.real_pool import Daemon
from tests.e2e.secured_daemons import Secrets, ask, call, master

EVENT_S = 20.0


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="module")
def daemon(secrets: Secrets) -> Iterator[Daemon]:
    pair = secrets.authority.pair("master")
    running = master(secrets.folder, *secrets.flags, *secrets.tls(pair))
    assert running.ready
    yield running
    running.end()


def test_the_page_is_public_and_what_it_shows_is_not(secrets: Secrets, daemon: Daemon) -> None:
    tls, http = client_context(secrets.ca), daemon.ready["http"]
    for path in PUBLIC:
        assert ask(http, "GET", path, tls=tls)[0] == 200
    for path in ("/status.json", "/events.json"):
        for token, status in (("", 401), ("kvs_" + "x" * 43, 401), (secrets.tokens["client"], 403)):
            answer = ask(http, "GET", path, token, tls=tls)
            assert answer[0] == status and b"cluster" not in answer[1]
        for name in ("read", "admin"):
            assert ask(http, "GET", path, secrets.tokens[name], tls=tls)[0] == 200


def test_orders_and_refusals_are_events_without_a_secret(secrets: Secrets, daemon: Daemon) -> None:
    policy = control.TenantPolicy(salt="team", dram_limit=1 << 30)
    call(daemon, "SetTenant", control.TenantSet(policy=policy), secrets.tokens["admin"], ca=secrets.ca)
    ask(daemon.ready["http"], "GET", "/status.json", "kvs_" + "y" * 43, tls=client_context(secrets.ca))
    deadline, kinds = time.monotonic() + EVENT_S, dict[str, Any]()
    while "refused" not in kinds:
        assert time.monotonic() < deadline, kinds
        _, body = ask(
            daemon.ready["http"], "GET", "/events.json", secrets.tokens["read"], tls=client_context(secrets.ca)
        )
        kinds = {event["kind"]: event["text"] for event in json.loads(body)["events"]}
    assert kinds["tenant.policy"] == "tenant team: memory 1 GiB (was without limit), by admin"
    assert kinds["refused"].startswith("refused: token: ")
    for secret in (*secrets.tokens.values(), secrets.key, "y" * 43):
        assert secret.encode() not in body


def top(daemon: Daemon, *options: str) -> Done:
    bare: dict[str, str | None] = {name: None for name in os.environ if name.startswith("KVSTRATA")}
    return run("top", "--master", daemon.ready["channel"], "--once", *options, env=bare)


def test_top_shows_its_token(secrets: Secrets, daemon: Daemon) -> None:
    files = {name: secrets.private(f"{name}.token", secrets.tokens[name] + "\n") for name in ("read", "client")}
    done = top(daemon, "--token-file", str(files["read"]), "--ca", str(secrets.ca))
    assert done.returncode == 0 and "NEEDS ATTENTION" in done.stdout, done.stderr
    for options, said in (
        (("--ca", str(secrets.ca)), "give --token-file"),
        (("--ca", str(secrets.ca), "--token-file", str(files["client"])), "needs the role read"),
    ):
        done = top(daemon, *options)
        assert done.returncode == 1 and said in done.stderr


def test_the_page_takes_a_token_once(secrets: Secrets, daemon: Daemon, tmp_path: Path) -> None:
    with browser() as chromium:
        page = chromium.new_context(ignore_https_errors=True).new_page()
        page.goto(f"https://{daemon.ready['http']}/")
        page.wait_for_selector("#token-form:not([hidden])")
        page.fill("#token", secrets.tokens["read"])
        page.keyboard.press("Enter")
        page.wait_for_selector("#content:not([hidden])")
        assert "no node has attached" in page.inner_text("#attention")

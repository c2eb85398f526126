"""``kvstrata top``: the pool in a terminal, live: the document that the masters' status page shows."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final

import typer

from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master
from kvstrata.cli.output import Exit, expected_errors, print_json, print_rich
from kvstrata.proto.errors import ConfigError, Forbidden, KVError, Refused, Unauthenticated, Unavailable

ANSWER_S: Final = 5.0
SCHEMA: Final = 1
SECONDS_MIN: Final = 0.5

Document = dict[str, Any]


def top(
    master: Master = DEFAULT_MASTER,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
    as_json: Json = False,
    seconds: Annotated[float, typer.Option("--seconds", min=SECONDS_MIN, help="Seconds between frames.")] = 2.0,
) -> None:
    """The pool, live: health, nodes, hit rate, tenants, events. q ends it.

    Without a terminal, or with --once, prints one frame. Exits 1 when the pool is in trouble, 3 when nobody answers.
    """
    with expected_errors():
        source = StatusSource(master)
        if as_json or once or not sys.stdout.isatty():
            document = source.ask()
            _print_one(document, as_json)
            raise typer.Exit(Exit.FAILED if document["verdict"] == "trouble" else Exit.OK)
        _live(source.ask, seconds)


class StatusSource:
    """Finds the leader's HTTP by the masters' hellos, or another master's, and asks it for the document."""

    def __init__(self, masters: str) -> None:
        from kvstrata.client.masters import parse_masters
        from kvstrata.client.security.credentials import Credentials

        self._addresses = parse_masters(masters)
        self._credentials = Credentials.given()
        self._found: tuple[str, str] | None = None

    def ask(self) -> Document:
        """Raises :class:`Unavailable`, :class:`Unauthenticated`, :class:`Forbidden`, :class:`Refused`."""
        if self._found is not None:
            try:
                document = self._get(*self._found)
                if document["master"]["leading"]:
                    return document
            except Unavailable:
                pass
            self._found = None  # another may lead now
        self._found = self._find()
        return self._get(*self._found)

    def _find(self) -> tuple[str, str]:
        """A channel address as it was given, and the HTTP endpoint behind it: the leader's, where one is known."""
        from kvstrata.client.security.greeting import greet

        problems, standby = [], None
        asked = list(self._addresses)
        for address in asked:
            try:
                hello = greet(address, "admin")
            except KVError as error:
                problems.append(str(error))
                continue
            if not hello.http:
                raise Unavailable(f"the master at {address} names no HTTP endpoint: start it with --http HOST:PORT")
            if hello.leading:
                return address, hello.http
            standby = standby or (address, hello.http)
            if hello.leader and hello.leader not in asked:
                asked.append(hello.leader)
        if standby is None:
            raise Unavailable("; ".join(problems))
        return standby

    def _get(self, address: str, http: str) -> Document:
        from kvstrata.client.security.https import request
        from kvstrata.transfer.identity import named_host

        answer = request(
            self._credentials,
            "GET",
            http,
            "/status.json",
            named=named_host(address, http),
            deadline=time.monotonic() + ANSWER_S,
        )
        if answer.status == 401:
            raise Unauthenticated(f"the master at {address} wants a token with the role read: give --token-file")
        if answer.status == 403:
            raise Forbidden("the token that was shown may not look at the pool: it needs the role read")
        if answer.status == 404:
            raise Refused(f"the master at {address} has no status document: it is older than this command")
        if answer.status != 200:
            raise Unavailable(f"{http}/status.json answers {answer.status}")
        try:
            document = json.loads(answer.body)
        except ValueError as error:
            raise Unavailable(f"{http}/status.json is not JSON: is it a master's HTTP?") from error
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise Refused(f"{http}/status.json has another schema than {SCHEMA}: upgrade the older side")
        return document


def _print_one(document: Document, as_json: bool) -> None:
    from kvstrata.cli.top_screen import frame

    if as_json:
        print_json(document)
    else:
        print_rich(frame(document))


def _live(ask: Callable[[], Document], seconds: float) -> None:
    """Frames until q, Ctrl-C, or the first question failed; later failures show what was known, and its age."""
    from rich.console import Console
    from rich.live import Live

    from kvstrata.cli.top_screen import frame

    document, asked_at = ask(), time.monotonic()
    console = Console()
    problem = ""
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            stale_s = time.monotonic() - asked_at if problem else 0.0
            live.update(frame(document, console.height, problem, stale_s), refresh=True)
            if pressed(seconds) in ("q", "Q", "\x03", "\x1b"):
                return
            try:
                document, asked_at, problem = ask(), time.monotonic(), ""
            except (Unavailable, ConfigError) as error:
                problem = str(error)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key, "" for none; the terminal is as before in the end."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def key(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    tty.setcbreak(fd)
    try:
        yield key
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)

"""The status page in a real browser: what it shows, to whom, how wide, and what hostile names cannot do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from kvstrata.client.client import Client
from kvstrata.master.status.events import Events
from kvstrata.master.status.pages import routes
from kvstrata.transfer.web import WebServer
from tests.e2e import status_documents as documents
from tests.e2e.browser import browser
from tests.e2e.real_pool import RealPool

WAIT_MS = 10_000
HOLDS_S = 30.0
SHOWN = "#content:not([hidden])"


class Stage:
    """Serves the page as a master does, with whatever ``document`` is; with a ``token``, to nobody else."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = documents.healthy()
        self.token = ""
        self.role_missing = False
        self.silent = False
        self.expected = ""  #: how what the browser may say on its console begins
        self.shown: list[str | None] = []
        self.pages = routes(self, Events())  # type: ignore[arg-type]
        application = Starlette(
            routes=[Route("/status.json", self._guarded), Mount("/below/a/prefix", routes=self.pages), *self.pages]
        )
        self.web = WebServer(application, "127.0.0.1:0").start()
        self.address = f"http://{self.web.address}/"

    def encoded(self) -> bytes:
        return json.dumps(self.document).encode("ascii")

    async def _guarded(self, request: Request) -> Response:
        self.shown.append(request.headers.get("authorization"))
        if self.silent:
            return JSONResponse({}, 503)
        if self.token and self.shown[-1] != f"Bearer {self.token}":
            return JSONResponse({"error": "who are you?"}, 401)
        if self.role_missing:
            return JSONResponse({"error": "not with that role"}, 403)
        return Response(self.encoded(), media_type="application/json")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened


@pytest.fixture
def stage() -> Iterator[Stage]:
    served = Stage()
    yield served
    served.web.stop()


@pytest.fixture(scope="module")
def tab(chromium: Any) -> Iterator[Tab]:
    context = chromium.new_context()
    yield Tab(context.new_page())
    context.close()


class Tab:
    """One page for all tests. What it keeps belongs to an address, and each stage has its own."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))


@pytest.fixture
def visit(tab: Tab, stage: Stage) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end it may have said nothing on its console but what was expected to fail."""
    page = tab.page

    def opened(path: str = "", width: int = 1280, theme: str = "light", wait: str = SHOWN) -> Any:
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=theme)
        page.goto((stage.address if "://" not in path else "") + path)
        page.wait_for_selector(wait)
        return page

    yield opened
    page.goto("about:blank")
    said, tab.said = tab.said, []
    assert [line for line in said if "Failed to load resource" not in line and line[:16] not in stage.expected] == []


def holds(page: Any, expression: str) -> None:
    """Wait until it does. The page's own policy forbids Playwright's way, which evaluates strings in the page."""
    deadline = time.monotonic() + HOLDS_S
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"it does not hold: {expression}"
        page.wait_for_timeout(20)


def text(page: Any, selector: str) -> str:
    return " ".join(page.inner_text(selector).split())


# ---------------------------------------------------------------------- what is shown


def test_five_seconds_at_three_in_the_morning(visit: Callable[..., Any], stage: Stage) -> None:
    stage.document = documents.trouble()
    page = visit()
    first_screen = page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter((e) => e.children.length === 0
           && e.getBoundingClientRect().top < innerHeight && e.checkVisibility()).map((e) => e.textContent).join(' ')"""
    )
    for needed in (
        "In trouble", "This master leads", "node node-05 is missing", "tenant search is at its limit",
        "the hit rate fell to 52%", "its node was lost", "6 of 8",
    ):  # fmt: skip
        assert needed in first_screen
    assert page.title().startswith("✕ In trouble (7)")
    rows = page.locator("#nodes tbody tr")
    assert rows.count() == 8 and "node-05" in rows.nth(0).inner_text() and "offline" in rows.nth(0).inner_text()


def test_it_is_live(visit: Callable[..., Any], stage: Stage) -> None:
    page = visit()
    assert text(page, "#verdict-word") == "Healthy" and text(page, "#live-text") == "live"
    page.evaluate("window.row = document.querySelector('#nodes tbody tr')")
    page.focus("#masters a")
    stage.document = documents.trouble()
    holds(page, "document.getElementById('verdict-word').textContent === 'In trouble'")
    assert "node-05" in text(page, "#nodes tbody tr:first-child")
    assert page.evaluate("window.row.isConnected && window.row.textContent.includes('node-05')")
    assert page.evaluate("document.activeElement.textContent") == "open"  # where the reader was


def test_it_says_that_it_is_stale_and_recovers(visit: Callable[..., Any], stage: Stage) -> None:
    page = visit()
    stage.silent = True
    page.wait_for_selector("#stale:not([hidden])")
    assert re.match(r"Stale since \S+.*: the master answers 503\. What is below", text(page, "#stale"))
    assert "8 of 8" in text(page, "#cards") and page.title().startswith("? Stale")
    stage.silent = False
    page.wait_for_selector("#stale", state="hidden")
    assert text(page, "#live-text") == "live"


def test_asking_slows_down_while_nobody_answers(visit: Callable[..., Any], stage: Stage) -> None:
    page = visit()
    stage.silent = True
    page.evaluate("""() => { window.waits = []; const real = window.setTimeout;
        window.setTimeout = (call, ms, ...more) => {
          window.waits.push(ms); return real(call, Math.min(ms, 20), ...more); }; }""")
    holds(page, "window.waits.filter((ms) => ms === 30000).length >= 2")
    waits = [ms for ms in page.evaluate("window.waits") if ms != 8000]
    assert waits[:3] == [pytest.approx(2000), pytest.approx(3200), pytest.approx(5120)] and max(waits) == 30_000


def test_a_pool_without_nodes_or_tenants_says_what_to_do(visit: Callable[..., Any], stage: Stage) -> None:
    stage.document = documents.empty()
    page = visit()
    assert "kvstrata storage --master 127.0.0.1:7400" in text(page, "#nodes")
    assert "kvstrata tenant set NAME" in text(page, "#tenants")
    assert "Nothing was looked up" in text(page, "#lookups") and "Nothing has happened" in text(page, "#events")
    assert 'Client("127.0.0.1:7400")' in text(page, "#clients")


def test_a_standby_says_so_and_leads_to_the_leader(visit: Callable[..., Any], stage: Stage) -> None:
    stage.document = documents.standby()
    page = visit()
    assert "This master stands by." in text(page, "#verdict-line")
    assert page.locator("#verdict-line a").get_attribute("href") == "http://10.0.0.2:7402/"
    assert "The leader alone knows" in text(page, "#tenants")


def test_it_works_below_a_prefix(visit: Callable[..., Any]) -> None:
    page = visit("below/a/prefix/")
    assert text(page, "#verdict-word") == "Healthy"
    assert page.evaluate("getComputedStyle(document.querySelector('.verdict')).borderLeftWidth") == "6px"


# ---------------------------------------------------------------------- hostile names, many rows, narrow screens


@pytest.mark.parametrize("which", ["healthy", "trouble", "empty", "standby", "hostile"])
def test_nothing_is_wider_than_the_screen(visit: Callable[..., Any], stage: Stage, which: str) -> None:
    stage.document = getattr(documents, which)()
    page = visit()
    for width in (360, 640, 781, 901, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut_off = page.evaluate(
            """() => [...document.querySelectorAll('.big, .badge, td.num, h2')].filter((e) =>
               e.checkVisibility() && e.getBoundingClientRect().right > innerWidth).map((e) => e.textContent)"""
        )
        assert cut_off == [], width


def test_hostile_names_are_text_and_nothing_else(visit: Callable[..., Any], stage: Stage) -> None:
    stage.document = documents.hostile()
    page = visit()
    assert "owned" not in page.title().split("·")[0]
    shown = page.evaluate("document.body.textContent")
    for name in documents.HOSTILE[:5]:
        assert name in shown
    foreign = "document.querySelectorAll('main script, main img, main iframe, main [onerror]').length"
    assert page.evaluate(foreign) == 0
    links = page.evaluate("[...document.querySelectorAll('a')].map((a) => a.protocol)")
    assert set(links) <= {"http:", "https:"}


def test_a_hundred_nodes_and_two_hundred_tenants(visit: Callable[..., Any], stage: Stage) -> None:
    stage.document = documents.hostile(100, 200)
    page = visit()
    assert page.locator("#nodes tbody tr").count() == page.locator("#tenants tbody tr").count() == 25
    page.fill("#nodes-filter", "42 ")
    holds(page, "document.querySelectorAll('#nodes tbody tr').length === 1")
    page.fill("#nodes-filter", "no such node")
    holds(page, "document.querySelector('#nodes').textContent.includes('None has that')")
    page.fill("#nodes-filter", "")
    page.click("#nodes button")
    holds(page, "document.querySelectorAll('#nodes tbody tr').length === 100")
    page.click("#tenants button")
    holds(page, "document.querySelectorAll('#tenants tbody tr').length === 200")


def test_the_browser_refuses_scripts_that_are_not_ours(visit: Callable[..., Any], stage: Stage) -> None:
    stage.expected = "Executing inline script violates"
    page = visit()
    ran = page.evaluate(
        """async () => {
           const blocked = new Promise((done) => addEventListener('securitypolicyviolation', () => done(true)));
           const made = document.createElement('script');
           made.textContent = 'window.ran = true';
           document.body.append(made);
           const late = new Promise((done) => setTimeout(done, 3000));
           return [await Promise.race([blocked, late]), window.ran === true]; }"""
    )
    assert ran == [True, False]


# ---------------------------------------------------------------------- tokens


def test_a_token_is_asked_for_once_and_forgotten_with_the_tab(visit: Callable[..., Any], stage: Stage) -> None:
    stage.token = "kvs_right"
    page = visit(wait="#token-form:not([hidden])")
    assert stage.shown == [None] and page.evaluate("document.activeElement.id") == "token"
    page.fill("#token", "kvs_wrong")
    page.keyboard.press("Enter")
    holds(page, "document.getElementById('token-why').textContent.includes('not known here')")
    page.fill("#token", "two words")
    page.click("#token-form button")
    assert "copied whole" in text(page, "#token-why")
    page.fill("#token", "kvs_right")
    page.click("#token-form button")
    page.wait_for_selector(SHOWN)
    assert page.url == stage.address and "kvs_right" not in page.content()
    page.reload()
    page.wait_for_selector(SHOWN)
    page.click("#forget")
    page.wait_for_selector("#token-form:not([hidden])")
    assert page.evaluate("sessionStorage.length + localStorage.length + document.cookie.length") == 0


def test_a_token_without_the_role_is_told_so(visit: Callable[..., Any], stage: Stage) -> None:
    stage.role_missing = True
    page = visit(wait="#token-form:not([hidden])")
    page.fill("#token", "kvs_engine")
    page.click("#token-form button")
    holds(page, "document.getElementById('token-why').textContent.includes('the role “read”')")


# ---------------------------------------------------------------------- for everybody's eyes and hands

CONTRAST = """() => {
  const parse = (c) => { const n = c.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = ([r, g, b]) => {
    const f = (v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
    return .2126 * f(r) + .7152 * f(g) + .0722 * f(b); };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) poor.push([e.className || e.tagName, e.textContent.slice(0, 30), ratio.toFixed(2)]);
  }
  return poor;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("which", ["trouble", "empty"])
def test_contrast_is_enough_to_read(visit: Callable[..., Any], stage: Stage, which: str, theme: str) -> None:
    stage.document = getattr(documents, which)()
    page = visit(theme=theme)
    assert page.evaluate(CONTRAST) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", background)[0]) > 128) == (theme == "light")


def test_landmarks_headers_and_names_for_those_who_listen(visit: Callable[..., Any], stage: Stage) -> None:
    stage.document = documents.trouble()
    page = visit()
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        for role in ("banner", "main", "contentinfo"):
            assert page.get_by_role(role).count() == 1
        assert page.get_by_role("table", name="Nodes").count() == 1
        nodes = page.get_by_role("table", name="Nodes")
        assert nodes.get_by_role("row").count() == 9 and nodes.get_by_role("rowheader").count() == 8
        assert page.locator("#nodes th[scope=col]").count() == 8
        assert page.locator("[aria-live=polite]").count() == 1 and page.locator("[role=alert]").count() == 1
        unnamed = "[...document.querySelectorAll('[role=img]')].filter((e) => !e.getAttribute('aria-label')).length"
        assert page.evaluate(unnamed) == 0
        assert page.evaluate("document.documentElement.lang") == "en"
        levels = page.evaluate(
            "[...document.querySelectorAll('h1,h2,h3')].filter(e => e.checkVisibility()).map(e => +e.tagName[1])"
        )
        assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))


def test_the_keyboard_reaches_everything(visit: Callable[..., Any], stage: Stage) -> None:
    stage.document = documents.hostile(30, 30)
    page = visit()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("(({ id, textContent }) => id || textContent)(document.activeElement)"))
        if reached[-1] == "healthz":
            break
    assert reached[0] == "Skip to the content" and reached[-1] == "healthz"
    assert {"nodes-filter", "tenants-filter", "Show all 30"} <= set(reached)


# ---------------------------------------------------------------------- a real pool


@contextmanager
def _pool(base: Any) -> Iterator[RealPool]:
    pool = RealPool(base, nodes=2)
    try:
        yield pool
    finally:
        pool.end()


def test_a_real_pool_from_its_master(visit: Callable[..., Any], tmp_path: Any) -> None:
    with _pool(tmp_path) as pool, Client(pool.address, name="an engine"):
        page = visit(f"http://{pool.daemons['master'].ready['http']}/")
        assert text(page, "#verdict-word") == "Healthy"
        assert page.locator("#nodes tbody tr").count() == 2
        holds(page, "document.getElementById('clients').textContent.includes('an engine')")
        lost = pool.node(1)
        lost.process.kill()
        holds(page, "document.getElementById('verdict-word').textContent === 'In trouble'")
        assert f"node {lost.ready['node_id']} is missing" in text(page, "#attention")
        assert "is gone" in text(page, "#events")

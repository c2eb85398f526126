"""A headless Chromium of this machine, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Its path, or a skip that says how to get one."""
    found = os.environ.get("KVSTRATA_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium, or name one in KVSTRATA_CHROMIUM")
    return found


@contextmanager
def browser() -> Iterator[Any]:
    """Playwright's browser; it ends with the block."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = chromium()
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield opened
        finally:
            opened.close()

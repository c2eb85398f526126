"""What the README shows is what happens: its Python example runs against a pool as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.cli.cluster import Cluster, Plan

ROOT = Path(__file__).resolve().parents[2]
CHECKS = """
import time
deadline = time.monotonic() + 10
while client.lookup(space, "tenant-a", hashes).hit_blocks != 8:
    assert time.monotonic() < deadline, "what was stored is not found"
    time.sleep(0.01)
again = client.load(space, "tenant-a", hashes, blocks[8:])
assert got.loaded.all() and again.loaded.all(), (got.reasons, again.reasons)
client.close()
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[str]:
    """The channel address of a pool with one node of 64 MiB."""
    cluster = Cluster(Plan(tmp_path, nodes=1, dram_bytes=64 << 20))
    try:
        assert cluster.start(lambda seconds: False)
        yield str(cluster.ready()["master"])
    finally:
        cluster.stop()


def test_the_python_example_runs(pool: str) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert example is not None and "127.0.0.1:7400" in example[1]
    program = example[1].replace("127.0.0.1:7400", pool) + CHECKS
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_links_lead_to_files_that_are_there() -> None:
    """Links between the pages of docs/ are checked where the site is built, with their anchors."""
    page = ROOT / "README.md"
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert len(links) > 5
    for link in links:
        assert (page.parent / link).exists(), f"{page.name} links to {link}"

"""A pool whose daemons send their spans to a collector."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.real_pool import ANY, Daemon, RealPool


class TracedPool(RealPool):
    """They send each second what callers sample, and more with ``options`` of the nodes."""

    def __init__(self, base: Path, collector: str, *options: str) -> None:
        self._collector = collector
        super().__init__(base, 1, "64MiB", options=("--traces", collector, *options))

    def start_master(self, listen: str) -> None:
        self.daemons["master"] = Daemon(
            "master", "--listen", listen, "--grpc", ANY, "--http", ANY, "--traces", self._collector,
            log=self._base / "master.log",
        )  # fmt: skip

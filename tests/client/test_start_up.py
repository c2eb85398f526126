"""What an engine pays for the client before it opens one."""

from __future__ import annotations

import subprocess
import sys

#: For metrics, gRPC calls, traces, encryption, files of policies and events: loaded by those who use them.
HEAVY = ("prometheus_client", "grpc", "opentelemetry", "cryptography", "yaml", "zmq")


def test_importing_the_client_loads_nothing_that_only_some_use() -> None:
    code = f"import sys, kvstrata.client; print([name for name in {HEAVY!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"

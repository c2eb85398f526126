"""What a process pays before it does anything."""

from __future__ import annotations

import subprocess
import sys

import kvstrata.client

#: For metrics, gRPC calls, traces, encryption, files of policies and events: loaded by those who use them.
HEAVY = ("prometheus_client", "grpc", "opentelemetry", "cryptography", "yaml", "zmq")


def loaded(code: str, names: tuple[str, ...]) -> str:
    """Which of ``names`` a process has imported after ``code``."""
    code = f"import sys; {code}; print(*(name for name in {names!r} if name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.strip()


def test_importing_the_client_loads_nothing_that_only_some_use() -> None:
    assert loaded("from kvstrata.client import Client", HEAVY) == ""
    assert loaded("from kvstrata.client import Client", ("numpy",)) == "numpy"


def test_the_command_line_loads_no_client_before_a_command_needs_one() -> None:
    assert loaded("import kvstrata.cli.app", ("kvstrata.client.client", "numpy", "grpc", "prometheus_client")) == ""


def test_the_client_s_names_are_there_when_they_are_asked_for() -> None:
    names = kvstrata.client.__all__
    assert set(names) == set(kvstrata.client._HOMES) and set(names) <= set(dir(kvstrata.client))
    assert all(getattr(kvstrata.client, name) is not None for name in names)
    assert not hasattr(kvstrata.client, "Clint")

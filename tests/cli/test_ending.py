"""A process that has had NIXL in it ends with its own exit code, and without the destructors of C libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: What the C library runs at an exit; Python's own exit functions come before.
SCRIPT = """
import atexit, ctypes, sys, types
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
if {nixl}:
    sys.modules["nixl_cu12._bindings"] = types.ModuleType("bindings")
from kvstrata.cli import app
def late():
    print("python's exit functions ran")
def ends(**_):
    atexit.register(late)
    print("work done")
    {end}
app.app = ends
app.main()
"""


def ended(nixl: bool, end: str) -> tuple[int, str]:
    script = SCRIPT.format(nixl=nixl, end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("raise ValueError", 1)]
)
def test_no_destructor_runs_and_the_code_is_the_commands(end: str, code: int) -> None:
    assert ended(True, end) == (code, "work done\npython's exit functions ran\n")


def test_without_nixl_a_process_ends_as_others_do() -> None:
    assert ended(False, "sys.exit(3)")[0] == -6, "abort, as the script's destructor does"

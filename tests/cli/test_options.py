"""Sizes, addresses, and where an option's value comes from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.sizes import UNITS, check_address, format_size, parse_size
from kvstrata.proto.errors import ConfigError
from tests import command_line
from tests.command_line import Done

COMMANDS = (["master"], ["storage"], ["dev"], ["health"], ["node", "list"], ["bench"], ["replay"], ["demo"])


def run(*arguments: str, **environment: str) -> Done:
    return command_line.run(*arguments, env={**environment, "COLUMNS": "200", "NO_COLOR": "1"})


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstrata.cli.app", *arguments],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("1048576", 1 << 20), ("512MiB", 512 << 20), ("2 GiB", 2 << 30), ("1.5kib", 1536), ("2TB", 2 * 10**12)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.3B", "1 XiB", "nan", "1e9", "2GiB2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


@given(st.integers(0, 1 << 50), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_of_any_unit_parse_exactly(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * UNITS[unit] or number * UNITS[unit] >= 1 << 53


@given(st.integers(0, 1 << 50))
def test_a_printed_size_is_near_what_it_stands_for(nbytes: int) -> None:
    text = format_size(nbytes)
    number = float(text.rstrip("KMGTPiB"))
    assert abs(number * UNITS[text.lstrip("0123456789.").upper()] - nbytes) <= nbytes * 0.006 + 1


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:7400", "host.example:65535"])
def test_addresses(text: str) -> None:
    assert check_address(text) == text


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:65536", "::1:7400", "host:-1", "host:x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        check_address(text)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0 and "Usage" in done.stdout and not done.stderr


def test_version() -> None:
    assert run_process("--version").stdout.startswith("kvstrata 0.")


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    """Each source sets --dram too small in its own way; the refusal shows which one counted."""
    config = tmp_path / "c.yaml"
    config.write_text("dram: 3MiB\n")
    said = [
        run("storage", "--config", str(config)).stderr,
        run("storage", "--config", str(config), KVSTRATA_STORAGE_DRAM="2MiB").stderr,
        run("storage", "--config", str(config), "--dram", "1MiB", KVSTRATA_STORAGE_DRAM="2MiB").stderr,
    ]
    assert [size in text for size, text in zip(("3MiB", "2MiB", "1MiB"), said, strict=True)] == [True] * 3


def test_one_file_may_serve_every_command(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("storage:\n  dram: 3MiB\nmaster:\n  listen: 127.0.0.1:0\n")
    assert "3MiB" in run("storage", "--config", str(config)).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drom: 1GiB", "did you mean 'dram'"),
        ("- a\n- b", "must be a mapping"),
        ("a: [", "not YAML"),
        ("dram: 1GiB\nmaster: {x: 1}", "not both"),
        ("dram: lots", "is not a size"),
        ("dram: {a: 1}", "'dram' is none"),
        ("storag: {dram: 1GiB}", "did you mean 'storage'"),
        ("listen: 7410", "HOST:PORT"),
        ("master: [127.0.0.1:1, nonsense]", "HOST:PORT"),
    ],
)
def test_a_wrong_file_is_refused_with_what_to_do(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    done = run("storage", "--config", str(config))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_missing_file_and_an_unknown_variable_are_refused() -> None:
    assert "cannot read" in run("master", "--config", "nowhere.yaml").stderr
    done = run("master", KVSTRATA_MASTER_LISTN="127.0.0.1:0")
    assert done.returncode == 2 and "KVSTRATA_MASTER_LISTEN" in done.stderr


def test_one_device_in_a_file_needs_no_list(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    for devices in ("/a=1KiB", "[/a=1KiB]"):
        config.write_text(f"storage:\n  ssd: {devices}\n")
        assert "/a is given 1024 bytes" in run("storage", "--config", str(config)).stderr


def test_what_kubernetes_says_of_a_service_is_no_option() -> None:
    """A service called kvstrata-storage puts such variables into every container of its namespace."""
    link = {"KVSTRATA_STORAGE_SERVICE_HOST": "10.0.0.1", "KVSTRATA_STORAGE_PORT": "tcp://10.0.0.1:7410"}
    link["KVSTRATA_STORAGE_PORT_7410_TCP_ADDR"] = "10.0.0.1"
    assert "1MiB" in run("storage", "--dram", "1MiB", **link).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["storage", "--ssd", "1GiB"], 2, "/mnt/nvme0/kv=800GiB"),
        (["storage", "--ssd", "x=1potato"], 2, "not a size"),
        (["storage", "--ssd", "x=1KiB"], 2, "at least 8MiB"),
        (["storage", "--ssd", "x=1GiB", "--ssd", "./x=1GiB"], 2, "twice"),
        (["storage", "--ssd-policy", "off"], 2, "add --ssd"),
        (["storage", "--ssd", "x=1GiB", "--ssd-daily-writes", "0"], 2, "--ssd-policy off"),
        (["storage", "--dram", "5x"], 2, "not a size"),
        (["master", "--listen", "nonsense"], 2, "HOST:PORT"),
        (["health", "--master", "127.0.0.1:1"], 3, "127.0.0.1:1"),
        (["node", "list", "--master", "127.0.0.1:1"], 3, "127.0.0.1:1"),
        (["health", "--master", "127.0.0.1:1,127.0.0.1:2"], 3, "127.0.0.1:2"),
        (["bench", "--master", "127.0.0.1:1"], 3, "127.0.0.1:1"),
        (["bench", "--size", "1B"], 2, "8 bytes a block"),
        (["bench", "--size", "1TiB"], 2, "16GiB a call"),
        (["demo", "--html", "nowhere/report.html"], 2, "nowhere"),
        (["replay", "--trace", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["replay", "--routing", "random"], 2, "round-robin"),
        (["nonsense"], 2, "nonsense"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_errors_say_what_to_do_and_end_with_their_code(arguments: list[str], code: int, said: str) -> None:
    done = run(*arguments)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["master", "--listen", "192.0.2.1:0", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"], 2, "cannot listen"),
        (["health", "--master", "127.0.0.1:1"], 3, "127.0.0.1:1"),
        (["storage", "--token-file", "nowhere"], 2, "nowhere"),
    ],
    ids=("daemon", "command", "option"),
)
def test_a_process_ends_with_the_code_and_no_traceback(arguments: list[str], code: int, said: str) -> None:
    done = run_process(*arguments)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr

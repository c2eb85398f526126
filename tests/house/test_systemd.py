"""The units in deploy/systemd start what exists, with the files that the page about them shows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main
import yaml

from kvstrata.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
PAGE = (ROOT / "docs" / "deploy-systemd.md").read_text()
PROGRAM = "/opt/kvstrata/bin/kvstrata"
#: Unit -> an instance's name, and the file that it reads.
SERVICES = {
    "kvstrata-master.service": ("", "/etc/kvstrata/master.yaml"),
    "kvstrata-storage@.service": ("numa0", "/etc/kvstrata/storage-numa0.yaml"),
}


def setting(unit: str, key: str) -> str:
    """The one value of a setting."""
    values = re.findall(rf"^{key}=(.*)$", (UNITS / unit).read_text(), re.M)
    assert len(values) == 1, (unit, key, values)
    return str(values[0])


def shown_file(path: str) -> str:
    """The YAML that the page shows for a file."""
    found = re.search(rf"```yaml\n# {re.escape(path)}\n(.*?)```", PAGE, re.S)
    assert found is not None, path
    return found[1]


def command_line(unit: str, instance: str, config: Path, folder: Path) -> list[str]:
    line = setting(unit, "ExecStart").replace("%i", instance).replace("%S", str(folder))
    program, *arguments = line.split()
    assert program == PROGRAM and "%" not in line
    return [str(config) if each == SERVICES[unit][1] else each for each in arguments]


@pytest.mark.parametrize("unit", SERVICES)
def test_the_command_line_and_the_file_that_is_shown_are_taken(unit: str, tmp_path: Path) -> None:
    instance, path = SERVICES[unit]
    config = tmp_path / "config.yaml"
    config.write_text(shown_file(path))
    command, *flags = command_line(unit, instance, config, tmp_path)
    assert str(config) in flags
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    with commands[command].make_context(command, flags) as context:  # it takes what it has parsed
        assert context.args == []
        for key, value in yaml.safe_load(config.read_text()).items():
            assert context.params[key] == value or key in ("dram", "ssd", "drain_on_stop"), key
    assert unit in PAGE or unit.removesuffix(".service") in PAGE


def test_a_drain_fits_into_the_time_that_a_stop_may_take() -> None:
    drain = yaml.safe_load(shown_file("/etc/kvstrata/storage-numa0.yaml"))["drain_on_stop"]
    assert int(setting("kvstrata-storage@.service", "TimeoutStopSec")) >= drain + 30
    for unit in SERVICES:
        assert setting(unit, "KillMode") == "mixed"  # heartbeats go on while the node drains
        assert setting(unit, "RestartPreventExitStatus") == "2"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("unit", SERVICES)
def test_systemd_takes_the_units(unit: str, tmp_path: Path) -> None:
    instance, _ = SERVICES[unit]
    copy = tmp_path / unit.replace("@.", f"@{instance}.")
    copy.write_text((UNITS / unit).read_text().replace(PROGRAM, "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in done.stderr.splitlines() if "kvstrata" in line]
    assert done.returncode == 0 and not ours, done.stderr

"""The image, without a container engine: what the Dockerfile says, and its build stage done in a directory."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kvstrata"
FOLDERS = ("proto", "transfer", "storage", "master", "client", "engine_adapter", "cli")
PREFIX = "/opt/kvstrata"


def stages() -> list[list[tuple[str, str]]]:
    """Instructions of each stage: (name, value). The build arguments before the first are left out."""
    parser = DockerfileParser(path=str(ROOT), cache_content=False, env_replace=False)
    found: list[list[tuple[str, str]]] = []
    for each in parser.structure:
        if each["instruction"] == "FROM":
            found.append([])
        if found and each["instruction"] != "COMMENT":
            found[-1].append((each["instruction"], each["value"]))
    return found


def values_of(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [value for name, value in stage if name == instruction]


def sent(path: str) -> bool:
    """Whether .dockerignore lets the path into the build: the last line that matches counts."""
    taken = True
    for line in (ROOT / ".dockerignore").read_text().split():
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = Path(path).parts
        inside = any(fnmatch.fnmatch("/".join(parts[: n + 1]), pattern) for n in range(len(parts)))
        anywhere = "**/" in line and any(fnmatch.fnmatch(part, pattern) for part in parts)
        if inside or anywhere:
            taken = line.startswith("!")
    return taken


def test_the_final_stage_has_no_compiler_no_root_and_one_entry() -> None:
    build, final = stages()
    assert values_of(final, "FROM") == ["python:${PYTHON}-slim-bookworm"]
    assert values_of(build, "FROM") == ["python:${PYTHON}-slim-bookworm AS build"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values_of(final, "USER") == [f"{values['runAs']['user']}:{values['runAs']['group']}"]
    assert values_of(final, "ENTRYPOINT") == ['["kvstrata"]']
    assert values_of(final, "COPY") == [f"--from=build {PREFIX} {PREFIX}"]
    assert len(values_of(final, "HEALTHCHECK")) == 1 and values_of(final, "STOPSIGNAL") == ["SIGTERM"]
    for run in values_of(final, "RUN"):
        assert not re.search(r"\b(gcc|g\+\+|build-essential|pip)\b", run)
    ports = {*values["master"]["ports"].values(), *values["storage"]["ports"].values()}
    assert {int(port) for port in " ".join(values_of(final, "EXPOSE")).split()} == ports


def test_the_image_is_the_version_that_the_chart_names() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', project, re.M)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert version and chart["appVersion"] == version[1]


def test_what_is_built_from_is_sent_and_nothing_else() -> None:
    copied = {name for value in values_of(stages()[0], "COPY") for name in value.split()[:-1]}
    assert copied == {*FOLDERS, "pyproject.toml", "README.md", "LICENSE"}
    assert all(sent(name) for name in copied)
    assert sent("proto/channel.proto") and sent("storage/ssd/log.py")
    for name in ("tests/conftest.py", ".venv/bin/python", ".git/config", "proto/__pycache__/wire.pyc", "bench/run.py"):
        assert not sent(name), name


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_build_stage_gives_both_daemons(tmp_path: Path) -> None:
    source, prefix = tmp_path / "src", tmp_path / "opt"
    arguments = dict(value.partition("=")[::2] for value in values_of(stages()[0], "ARG"))
    assert arguments == {"EXTRAS": "redis,encryption", "NIXL": ""}
    for instruction, value in stages()[0]:
        if instruction == "COPY":
            *names, target = value.split()
            for name in names:
                _copy(ROOT / name, source / target / (Path(name).name if target.endswith("/") else ""))
        elif instruction == "RUN":
            command = value.replace(PREFIX, str(prefix)).replace("python -m", f"{shlex.quote(sys.executable)} -m")
            environment = {**os.environ, **arguments}
            done = subprocess.run(["sh", "-c", command], cwd=source, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
    for command in ("master", "storage"):
        shown = subprocess.run(
            [prefix / "bin/kvstrata", command, "--help"], capture_output=True, text=True, timeout=60, check=True
        )
        assert "--listen" in shown.stdout
    assert not (prefix / "bin/pip").exists()
    probe = "import cryptography, kvstrata.master.daemon, kvstrata.storage.daemon, redis"
    subprocess.run([prefix / "bin/python", "-c", probe], cwd=tmp_path, timeout=60, check=True)


def _copy(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, target, ignore=lambda at, names: [n for n in names if not sent(_relative(at, n))])
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def _relative(at: str, name: str) -> str:
    return str((Path(at) / name).relative_to(ROOT))

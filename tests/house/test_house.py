"""The house itself: folders against the package map, the import rule, what a wheel carries, generated code."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from kvstrata.proto.generate import generate, stale

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("proto", "transfer", "storage", "master", "client", "engine_adapter", "cli")
MAY_IMPORT = {
    "proto": {"proto"},
    "transfer": {"transfer", "proto"},
    "storage": {"storage", "proto", "transfer"},
    "master": {"master", "proto", "transfer"},
    "client": {"client", "proto", "transfer"},
    "engine_adapter": {"engine_adapter", "proto", "client", "transfer"},
    "cli": set(FOLDERS),
}
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if not GENERATED.search(path.name))


def imported(path: Path) -> set[str]:
    """Every module an ``import`` anywhere in the file names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            if node.module == "kvstrata":
                names.update(f"kvstrata.{alias.name}" for alias in node.names)
    return names


def test_the_package_list_is_what_the_folders_hold() -> None:
    settings = project()["tool"]["setuptools"]  # type: ignore[index]
    found = {
        "kvstrata." + ".".join(init.parent.relative_to(ROOT).parts): str(init.parent.relative_to(ROOT))
        for folder in FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(settings["packages"]) == set(found)
    mapped = settings["package-dir"]
    for package, folder in found.items():
        top = ".".join(package.split(".")[:2])
        assert mapped.get(package, folder) == folder and top in mapped


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_is_typed(folder: str) -> None:
    assert (ROOT / folder / "py.typed").exists()


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_they_may(folder: str) -> None:
    for path in modules(folder):
        for name in imported(path):
            if name.startswith("kvstrata."):
                assert name.split(".")[1] in MAY_IMPORT[folder], f"{path.relative_to(ROOT)} imports {name}"
            assert name.split(".")[0] not in FOLDERS, f"{path.relative_to(ROOT)}: bare import {name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_module_says_what_it_is(folder: str) -> None:
    for path in modules(folder):
        assert ast.get_docstring(ast.parse(path.read_text())) or path.read_text().strip() == "", path


def test_no_pickle_and_no_path_of_one_machine() -> None:
    texts = {path: path.read_text() for folder in (*FOLDERS, "bench", "tests", "docs") for path in _texts(folder)}
    for path, text in texts.items():
        if path == Path(__file__):
            continue
        assert not re.search(r"^\s*(import|from)\s+pickle\b", text, re.M), path
        assert "/" + "work/" not in text and "/" + "root/" not in text, path


def _texts(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".proto", ".sh")]


def test_generated_code_is_current() -> None:
    assert stale(generate()) == []


def test_a_wheel_carries_kvstrata_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    tree = tmp_path / "tree"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    done = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(tree)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("kvstrata-*.whl"))).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvstrata"}
    for folder in FOLDERS:
        assert f"kvstrata/{folder}/py.typed" in names
    assert "kvstrata/proto/channel.proto" in names
    site = tmp_path / "site"
    zipfile.ZipFile(next(tmp_path.glob("kvstrata-*.whl"))).extractall(site)
    probe = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    seen = subprocess.run(
        [sys.executable, "-S", "-c", probe, *FOLDERS],
        env={"PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert seen.stdout.strip() == "[]"


def test_the_licence_and_the_two_commands_are_there() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    opening = (ROOT / "README.md").read_text()[:2500]
    assert "./dev demo" in opening and "./dev test" in opening
    for script in ("dev", ".ci/run"):
        assert (ROOT / script).stat().st_mode & 0o111, script

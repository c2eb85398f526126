"""A small router, as an example: OpenAI's completions, forwarded to the engine that has most of the prompt.

    python bench/small_router.py --master 127.0.0.1:7400 --listen 127.0.0.1:9000 \\
        a=http://127.0.0.1:8000 b=http://127.0.0.1:8001

Names are those of the master's ``--engine-events``. Prompts are hashed as the bundled engine does, a byte a token. What
it does not do: streams, retries, health checks of engines. A router that asks for each request should keep an
``IndexWatch`` instead.
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from kvstrata.client.admin import AdminClient
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.proto.errors import KVError

#: Requests under way that make an engine fully loaded.
BUSY_AT: Final = 16
BODY_BYTES_MAX: Final = 4 << 20
ANSWER_S: Final = 300.0


class Router:
    """Picks engines, and counts what is under way. Thread-safe."""

    def __init__(self, admin: AdminClient, engines: dict[str, str]) -> None:
        self._admin = admin
        self._engines = engines
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter(dict.fromkeys(engines, 0))

    def pick(self, prompt: str, salt: str) -> str:
        with self._lock:
            loads = {name: min(1.0, count / BUSY_AT) for name, count in self._under_way.items()}
        name = self._by_cache(prompt, salt, loads) or min(loads, key=lambda each: loads[each])
        with self._lock:
            self._under_way[name] += 1
        return name

    def done(self, name: str) -> None:
        with self._lock:
            self._under_way[name] -= 1

    def url(self, name: str) -> str:
        return self._engines[name]

    def _by_cache(self, prompt: str, salt: str, loads: dict[str, float]) -> str:
        """The first that is live; "" when the pool cannot be asked: routing then goes on by load alone."""
        try:
            specs = [row.spec for row in self._admin.namespaces()]
            if not specs:
                return ""
            hasher = BlockHasher(specs[0].block_tokens)
            hashes: list[bytes] = []
            hasher.extend(hasher.root(salt), hashes, list(prompt.encode()))
            answer = self._admin.route(specs[0], salt, b"".join(hashes), loads=loads, engines=list(self._engines))
        except KVError:
            return ""
        return next(
            (row.name for row in answer.engines if row.state == "live" and row.own_blocks + row.pool_blocks), ""
        )


def handler_of(router: Router) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            if not 0 < size <= BODY_BYTES_MAX:
                self.send_error(413)
                return
            body = self.rfile.read(size)
            asked: dict[str, Any] = json.loads(body)
            name = router.pick(str(asked.get("prompt", "")), str(asked.get("cache_salt") or ""))
            try:
                request = urllib.request.Request(
                    router.url(name) + self.path, body, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                    said = answer.read()
            except OSError as error:
                self.send_error(502, str(error))
                return
            finally:
                router.done(name)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.send_header("X-Engine", name)
            self.end_headers()
            self.wfile.write(said)

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description="Forward completions to the engine that has most of the prompt.")
    parser.add_argument("--master", default="127.0.0.1:7400")
    parser.add_argument("--listen", default="127.0.0.1:9000")
    parser.add_argument("engines", nargs="+", metavar="NAME=URL")
    given = parser.parse_args()
    host, _, port = given.listen.rpartition(":")
    with AdminClient(given.master) as admin:
        router = Router(admin, dict(each.split("=", 1) for each in given.engines))
        server = ThreadingHTTPServer((host, int(port)), handler_of(router))
        print(f"listening on http://{host}:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()

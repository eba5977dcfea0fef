"""A chat service in a thread, which says and does whatever a test scripts."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sspjax.self_play.exact import exact_match


@dataclasses.dataclass(frozen=True)
class Reply:
    """What the service does with one request."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    delay: float = 0.0
    trickle: float = 0.0
    """Seconds between two bytes of the body."""
    hang_up: bool = False
    """Close the connection without a word."""


def text(content: Any, **fields: Any) -> Reply:
    """A chat completion."""
    message = {"role": "assistant", "content": content}
    return Reply(body=json.dumps({"choices": [{"message": message}]}).encode(), **fields)


Script = Callable[[Mapping[str, Any]], Reply]
"""The JSON of a request to what is done with it."""


class Service:
    """Where it listens, what it was asked, and what it does next (`script` may be exchanged)."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.url = ""
        self._lock = threading.Lock()

    def handle(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        request = json.loads(body)
        with self._lock:
            self.requests.append(request)
            self.headers.append(dict(handler.headers.items()))
            self.paths.append(handler.path)
            self.times.append(time.monotonic())
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        reply = self.script(request)
        time.sleep(reply.delay)
        with self._lock:
            self.in_flight -= 1
        # A client that has lost patience is gone.
        with contextlib.suppress(ConnectionError):
            if reply.hang_up:
                handler.close_connection = True
                return
            handler.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": str(len(reply.body))}.items():
                handler.send_header(name, value)
            handler.end_headers()
            if not reply.trickle:
                handler.wfile.write(reply.body)
                return
            for byte in reply.body:
                handler.wfile.write(bytes([byte]))
                time.sleep(reply.trickle)


@contextlib.contextmanager
def serving(script: Script, port: int = 0) -> Iterator[Service]:
    """A service on this machine; `port` 0 takes a free one."""
    service = Service(script)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            service.handle(self)

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def claimed(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a judge's request is about."""
    return json.loads(request["messages"][-1]["content"])


def fair(request: Mapping[str, Any]) -> Reply:
    """Judges by exact match, and says Ready to whatever is no claim."""
    content = request["messages"][-1]["content"]
    if not content.startswith("{"):
        return text("Ready")
    shown = json.loads(content)
    right = exact_match(shown["given_answer"], shown["accepted_answers"])
    return text("Correct." if right else "Incorrect.")

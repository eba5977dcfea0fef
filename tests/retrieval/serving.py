"""Servers of tests: the service in a thread, and servers that answer wrongly on purpose."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import uvicorn

from sspjax.retrieval.client import make_retriever
from sspjax.retrieval.corpus import MemoryCorpus
from sspjax.retrieval.server import listen
from sspjax.retrieval.service import Limits, application
from sspjax.types import Document

CORPUS = MemoryCorpus(
    [
        Document(id="ada", title="Ada Lovelace", text="She wrote the first program ."),
        Document(id="babbage", title="Charles Babbage", text="He built engines with Ada ."),
        Document(id="engine", title="Analytical Engine", text="A machine for any program ."),
        Document(id="loom", title="Loom", text="A machine that weaves ."),
    ]
)


def retriever_of(corpus=CORPUS):
    return make_retriever(corpus, encoder="tfidf")


@contextlib.contextmanager
def serving(retriever, *, key="", **limits):
    """The service in a thread of this process; gives its base URL."""
    listening = listen("127.0.0.1", 0)
    app = application(retriever, Limits(**limits), key=key)
    config = uvicorn.Config(app, http="h11", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def answering(answer):
    """A server whose POSTs are answered by `answer(request) -> (status, body)`, with what it was
    asked: `body` is bytes or JSON. It knows no other path, as Search-R1's does not.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request)
            self._send(*answer(request))

        def do_GET(self):
            self._send(404, {"detail": "Not Found"})

        def _send(self, status, body, headers=()):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format, *args):
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

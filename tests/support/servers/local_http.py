"""Run a small HTTP server on loopback within a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def local_http(handler: type[BaseHTTPRequestHandler], *, waits: bool) -> Iterator[str]:
    """Serve with a handler; yield the address. At the end, wait for open connections only if requested: clients may keep them."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = not waits
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

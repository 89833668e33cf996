"""A server from which a download takes long."""

from __future__ import annotations

import contextlib
import http.server
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def slow_server(duration_s: float, pause_s: float) -> Iterator[str]:
    """The URL of a file that comes byte by byte, with this pause between two bytes."""
    count = max(int(duration_s / pause_s), 1)
    is_over = threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(count))
            self.end_headers()
            for _ in range(count):
                is_over.wait(pause_s)
                self.wfile.write(b"x")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            is_over.set()
            server.shutdown()
            thread.join()

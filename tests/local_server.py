"""A web server of a test, on the loopback, in threads of the test."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class LocalServer:
    def __init__(self, handler: type[BaseHTTPRequestHandler], certificate: Path | None = None) -> None:
        """`certificate`: a PEM file with a key; then it speaks TLS, as the host `localhost`."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.url = f"https://localhost:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class AskedServer(LocalServer):
    """A server that notes what it is asked."""

    requests: list[str]

    def asked(self, what: str = "") -> list[str]:
        """The requests since this was called last, those that begin so."""
        requests, self.requests = self.requests, []
        return [request for request in requests if request.startswith(what)]

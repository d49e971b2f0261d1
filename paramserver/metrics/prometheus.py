"""The sink from which Prometheus scrapes the newest value of each curve of a run."""

from __future__ import annotations

import logging
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from paramserver.cluster import host_and_port
from paramserver.metrics.sinks import Record, Sink
from paramserver.metrics.tensorboard import scalars, unreserved

log = logging.getLogger("paramserver")

_CLOSE_S = 5.0
_REQUEST_S = 2.0
_TRAINER = re.compile(r"/trainer-(\d+)")


class Prometheus(Sink):
    """Serves the newest value of each curve at ``/metrics``, in the text format of Prometheus.

    Names are TensorBoard's tags with ``paramserver_`` before them and ``_`` for what no name may have; the trainer of a
    curve is a label, and so is the name of the ``run``. All are gauges. This object closes the socket of the port.
    """

    def __init__(self, listener: socket.socket, run: str) -> None:
        self.address = f"http://{host_and_port(*listener.getsockname()[:2])}/metrics"
        self._run = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._lock = threading.Lock()  # of the values
        self._values: dict[str, dict[str, float]] = {}  # by name and labels
        self._closing = False
        self._server = _Server(self, listener)
        # Ends with ``close``; one request at a time, each within a limit.
        self._thread = threading.Thread(target=self._serve, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        points = [(name, record.get(name)) for name in ("step", "samples") if record["kind"] == "train"]
        with self._lock:
            for tag, value in (*points, *scalars(record)):
                if value is not None:
                    labels = "".join(f',trainer="{index}"' for index in _TRAINER.findall(tag)[:1])
                    name = re.sub(r"\W", "_", _TRAINER.sub("", tag), flags=re.ASCII)
                    if record["kind"] in ("log", "reduced"):
                        name = unreserved(name, "_")
                    self._values.setdefault(f"paramserver_{name}", {})[f'run="{self._run}"{labels}'] = float(value)

    def text(self) -> str:
        """Return what a scrape gets."""
        with self._lock:
            lines = [
                line
                for name, values in self._values.items()
                for line in (f"# TYPE {name} gauge", *(f"{name}{{{key}}} {value}" for key, value in values.items()))
            ]
        return "\n".join((*lines, ""))

    def _serve(self) -> None:
        while not self._closing:
            self._server.handle_request()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._server.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a request
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.warning("a request to %s did not end within %g s; its thread is abandoned", self.address, _CLOSE_S)
        self._server.server_close()


class _Server(HTTPServer):
    def __init__(self, sink: Prometheus, listener: socket.socket) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.sink = listener, sink

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = self.server.sink.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no request."""

"""A local HTTP server for tests of downloads, and an address at which nothing listens."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HttpMirror(ThreadingHTTPServer):
    """Serves files by name from memory and records the requests.

    Args:
        served: contents by name; None for an endless response.
        patience_s: how long the first request is kept waiting for a second one.
    """

    def __init__(self, served, patience_s=0.0):
        super().__init__(("127.0.0.1", 0), Answer)
        self.served, self.patience_s = served, patience_s
        self.asked, self.second, self.lock = [], threading.Event(), threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/mnist/"

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, name="mirror")
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.shutdown()
        self.thread.join(10)
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        with self.server.lock:
            self.server.asked.append(self.path)
            first = len(self.server.asked) == 1
        if not first:
            self.server.second.set()
        elif self.server.patience_s:
            self.server.second.wait(self.server.patience_s)
        content = self.server.served.get(self.path.rpartition("/")[2], b"")
        self.send_response(200 if content != b"" else 404)
        self.end_headers()
        try:
            while content is None:
                self.wfile.write(b"x")
            self.wfile.write(content)
        except OSError:
            pass  # the client has closed the connection

    def log_message(self, *arguments):
        pass


def closed_address():
    """An address at which nothing listens, and the bound socket that reserves it."""
    kept = socket.socket()
    kept.bind(("127.0.0.1", 0))
    return f"http://127.0.0.1:{kept.getsockname()[1]}/mnist/", kept

"""A service as `seqmtp bench startup` sees it: `python pretend_service.py PORT [leave-behind|die]`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STARTED = time.monotonic()
EVENTS = [
    {"choices": [{"index": 0, "delta": {"content": "Hello"}}]},
    {"choices": [], "usage": {"completion_tokens": 1}},
]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = time.monotonic() - STARTED > 0.3
        self._answer(200 if ready else 503, json.dumps({"data": [{"id": "pretend"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def main(port: str, manner: str = "") -> None:
    if manner == "die":
        sys.exit("no weights here")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def stop(*_: object) -> None:
        if manner != "leave-behind":
            child.kill()
            child.wait()
        sys.exit(0)

    signal.signal(signal.SIGINT, stop)
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


main(*sys.argv[1:])

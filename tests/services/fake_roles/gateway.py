"""`python -m tests.services.fake_roles.gateway`: answers /ready once it listens, and logs the store it was given."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from services.settings import from_json

READY = {"ready": True, "model": "fake", **{side: {"ready": True, "detail": ""} for side in ("store", "target", "mtp")}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(READY).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    settings = from_json(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
    print(f"store {settings.store.url}", file=sys.stderr)
    HTTPServer((settings.gateway.host, settings.gateway.port), Handler).serve_forever()

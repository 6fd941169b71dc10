"""A tiny OpenAI-like server whose speculation is known: each answer is one first token, then the rounds of ACCEPTED."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACCEPTED = (3, 0, 1, 2, 0)  # drafts accepted per round, of DEPTH
DEPTH = 3
NUM_TOKENS = 1 + sum(accepted + 1 for accepted in ACCEPTED) - 1  # the last round is cut by one token
FIRST_S, ROUND_S = 0.03, 0.01


class Server(ThreadingHTTPServer):
    daemon_threads = True
    answers = 0
    counting = threading.Lock()

    def handle_error(self, *_):
        """Clients that go away in the middle are part of a load test."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a chunk waits for the acknowledgement of the one before

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/metrics":
            counts = {"drafts": len(ACCEPTED), "draft_tokens": DEPTH * len(ACCEPTED), "accepted_tokens": sum(ACCEPTED)}
            lines = [f"vllm:spec_decode_num_{name}_total {each * self.server.answers}" for name, each in counts.items()]
            self._headers("text/plain", "\n".join(lines).encode())
        else:
            self._headers("application/json", b'{"data": [{"id": "mock"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "mock"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        time.sleep(FIRST_S)
        self._delta("one")
        if "FAIL" in body["messages"][-1]["content"]:
            self._event({"error": {"code": "internal_error", "message": "asked for"}})
        else:
            for number in ACCEPTED:
                time.sleep(ROUND_S)
                self._delta(" more" * (number + 1))
            self._tail()
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _tail(self):
        with self.server.counting:
            self.server.answers += 1
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        speculation = {
            "acceptance_histogram": [ACCEPTED.count(number) for number in range(DEPTH + 1)],
            "num_spec_steps": len(ACCEPTED),
            "num_draft_tokens": DEPTH * len(ACCEPTED),
            "num_accepted_draft_tokens": sum(ACCEPTED),
        }
        usage = {"prompt_tokens": 5, "completion_tokens": NUM_TOKENS}
        self._event({"choices": [], "usage": usage, "metrics": {"speculative_decoding": speculation}})

    def _delta(self, text):
        self._event({"choices": [{"index": 0, "delta": {"content": text}}]})

    def _event(self, chunk):
        self._write(b"id: r:1\ndata: " + json.dumps(chunk).encode() + b"\n\n")

    def _write(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _headers(self, kind, data):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def mock_server():
    """Serve on a free loopback port; yields the base URL."""
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

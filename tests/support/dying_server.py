"""An HTTP server that speaks as SGLang does. The first one breaks or aborts its requests, and dies a while later.

python dying_server.py SECONDS FILE breaks|aborts --port PORT: SECONDS until it dies; FILE says whether one has died already
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WAIT_S, DIED, HOW, PORT = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[sys.argv.index("--port") + 1])

dies = not DIED.exists()


def die() -> None:
    time.sleep(WAIT_S)
    print("Received sigquit from a child process", flush=True)
    os._exit(7)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.say({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            return self.say({})
        if dies:
            if not DIED.exists():
                DIED.touch()
                threading.Thread(target=die).start()
            if HOW == "aborts":
                self.stream({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "shutting down"}}})
            return None
        count = body["sampling_params"]["max_new_tokens"]
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-1.0, 5, None]] * count,
            "weight_versions": [{"version": "0", "start": 0, "end": count}],
        }
        return self.stream({"output_ids": [5] * count, "meta_info": meta})

    def stream(self, said: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n".encode())

    def say(self, answer: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()

"""An HTTP server that answers as vLLM does: each token is the one before plus one, and goes to experts by its number."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_LAYERS, NUM_EXPERTS = 2, 4


def experts_of(tokens: list[int]) -> npt.NDArray[np.uint8]:
    """[T, layers, 2]: which experts a token goes to."""
    first = (np.array(tokens)[:, None] + np.arange(NUM_LAYERS)) % NUM_EXPERTS
    return np.stack([first, (first + 1) % NUM_EXPERTS], -1).astype(np.uint8)


class _Handler(BaseHTTPRequestHandler):
    returns_experts = True

    def do_GET(self) -> None:
        config = {"cache_config": {}, "model_config": {"logprobs_mode": "raw_logprobs"}}
        config["aux_output_config"] = {"enable_return_routed_experts": self.returns_experts}
        answers = {"/server_info": {"vllm_config": config}, "/v1/models": {"data": [{"max_model_len": 64}]}}
        self._say(answers.get(self.path.partition("?")[0], {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if self.path != "/inference/v1/generate":
            return self._say({})
        prompt = body["token_ids"]
        made = [prompt[-1] + 1 + number for number in range(body["sampling_params"]["max_tokens"])]
        self.send_response(200)
        self.end_headers()
        for number, token in enumerate(made):
            choice: dict[str, Any] = {"index": 0, "finish_reason": None, "token_ids": [token]}
            choice["logprobs"] = {"content": [{"token_id": token, "logprob": -1.0}]}
            if number == len(made) - 1:
                with io.BytesIO() as file:
                    np.save(file, experts_of([*prompt, *made])[:-1])
                    choice["routed_experts"] = base64.b64encode(file.getbuffer()).decode()
                choice["finish_reason"], choice["weight_versions"] = "length", [{"version": "0", "start": 0, "end": len(made)}]
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, answer: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def vllm_server(*, returns_experts: bool = True) -> Iterator[str]:
    """Its address."""
    handler = type("Handler", (_Handler,), {"returns_experts": returns_experts})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()

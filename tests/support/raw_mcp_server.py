"""An MCP server without a library, for tests: `raw_mcp_server.py FILE`, a JSON object with `tools` and by name what a call is answered.

An answer `{"sleep": seconds}` takes so long; `{"deaf": true}` closes the output and hears nothing more; anything else is what the
response has beside its id.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

GIVEN: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
LOCK = threading.Lock()
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "raw", "version": "1"}}


def answer(number: object, **said: object) -> None:
    with LOCK:
        print(json.dumps({"jsonrpc": "2.0", "id": number, **said}), flush=True)


def called(number: object, name: str) -> None:
    how = GIVEN.get("answers", {}).get(name, {"result": {"content": [{"type": "text", "text": "fine"}]}})
    time.sleep(how.get("sleep", 0))
    if how.get("deaf"):
        os.close(1)
        return
    answer(number, **({"result": {"content": [{"type": "text", "text": "late"}]}} if "sleep" in how else how))


time.sleep(GIVEN.get("starts_after", 0))
for line in sys.stdin:
    message = json.loads(line)
    number, method = message.get("id"), message.get("method")
    if method == "initialize":
        answer(number, result=HELLO)
    elif method == "tools/list":
        answer(number, result={"tools": GIVEN["tools"]})
    elif method == "tools/call":
        if GIVEN.get("answers", {}).get(message["params"]["name"], {}).get("deaf"):
            called(number, message["params"]["name"])
            threading.Event().wait()
        threading.Thread(target=called, args=(number, message["params"]["name"]), daemon=True).start()
    elif number is not None:
        answer(number, error={"code": -32601, "message": "there is no such method"})

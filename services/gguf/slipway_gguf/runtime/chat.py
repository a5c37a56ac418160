"""Render conversations with llama.cpp's own engine for chat templates, which only its server has."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slipway_gguf.runtime.llama import Llama
from slipway_validate.runner.model import Unusable

_SECONDS = 60.0
_LARGEST = 16 << 20


class ChatServer:
    """llama.cpp's server in this process, on a port of this machine alone. It has the file's vocabulary, and its template unless another is given."""

    def __init__(self, llama: Llama, file: Path, *, threads: int, template: str = "") -> None:
        import xllamacpp

        self._llama, self._server = llama, None
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.chat_template = template
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, 1
        params.hostnames, params.port, params.ui = ["127.0.0.1"], 0, False
        params.n_gpu_layers, params.endpoint_slots = 0, True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, threads)
        self._server = xllamacpp.Server(params)
        self._address = urlsplit(self._server.listening_address)

    def end(self) -> None:
        """End the server.

        It answers requests before its loop begins, and ended in between it would begin the loop and never leave it. So this waits for the answer to a
        request that the loop itself takes.
        """
        if self._server is not None:
            with contextlib.suppress(Unusable):
                self._answer("GET", "/slots")
            self._server = None
            self._llama.listen()  # the server had the log

    __del__ = end

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """Return the prompt of a conversation whose next turn is the model's.

        Raises:
            Unusable: The template cannot be rendered.
        """
        request = json.dumps({"messages": list(messages), **({"tools": list(tools)} if tools else {})})
        status, found = self._answer("POST", "/apply-template", request)
        if status != http.client.OK or not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
            raise Unusable(f"llama.cpp cannot render its chat template: {str(found)[:300]}")
        return str(found["prompt"])

    def _answer(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read(_LARGEST))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unusable(f"llama.cpp's server does not answer: {error}") from error
        finally:
            connection.close()

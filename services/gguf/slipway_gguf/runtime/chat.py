"""Render conversations with llama.cpp's own engine for chat templates, which only its server has."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slipway_validate.runner.model import Unusable

_SECONDS = 60.0
_LARGEST = 16 << 20


class ChatServer:
    """llama.cpp's server in this process, on a port of this machine alone. It has the file's vocabulary, and its template unless another is given."""

    def __init__(self, file: Path, *, threads: int, template: str = "") -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.chat_template = template
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, 1
        params.hostnames, params.port, params.ui = ["127.0.0.1"], 0, False
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, threads)
        self._server = xllamacpp.Server(params)
        self._address = urlsplit(self._server.listening_address)

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """Return the prompt of a conversation whose next turn is the model's.

        Raises:
            Unusable: The template cannot be rendered.
        """
        request = json.dumps({"messages": list(messages), **({"tools": list(tools)} if tools else {})})
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=_SECONDS)
        try:
            connection.request("POST", "/apply-template", request, {"Content-Type": "application/json"})
            response = connection.getresponse()
            found = json.loads(response.read(_LARGEST))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unusable(f"llama.cpp's server does not render a conversation: {error}") from error
        finally:
            connection.close()
        if response.status != http.client.OK or not isinstance(found.get("prompt"), str):
            raise Unusable(f"llama.cpp cannot render its chat template: {str(found)[:300]}")
        return str(found["prompt"])

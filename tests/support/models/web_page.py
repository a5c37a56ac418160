"""Run a model in headless Chromium: a page from localhost loads transformers.js and posts what it computes."""

from __future__ import annotations

import json
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

_PAGE = """<!doctype html><script type="module">
const asked = ASKED;
const done = (value) => fetch("/done", { method: "POST", body: JSON.stringify(value) });
try {
  const { env, pipeline } = await import("/modules/@huggingface/transformers/dist/transformers.min.js");
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/models/", useBrowserCache: false });
  Object.assign(env.backends.onnx.wasm, { wasmPaths: "/modules/onnxruntime-web/dist/", numThreads: 1 });
  const run = await pipeline(asked.task, "model", { dtype: asked.dtype, device: "wasm" });
  await done(await run(asked.text, asked.options));
} catch (error) { await done({ error: `${error} ${error.stack}` }); }
</script>"""

# Without these, the browser looks up hosts of its maker at every start.
_CHROMIUM = (
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def result_of_page(*, modules: Path, model: Path, profile: Path, timeout: float = 180, **asked: Any) -> Any:
    """Return what a pipeline of transformers.js gives in a page; ``asked`` has its task, dtype, text and options."""
    results: Queue[bytes] = Queue()
    page = _PAGE.replace("ASKED", json.dumps(asked)).encode()

    class Handler(SimpleHTTPRequestHandler):
        extensions_map = {".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm"}  # noqa: RUF012

        def translate_path(self, path: str) -> str:
            for start, root in (("/modules/", modules), ("/models/model/", model)):
                if path.startswith(start):
                    return str(root / path.removeprefix(start).partition("?")[0])
            return "/nonexistent"

        def do_GET(self) -> None:
            if self.path != "/":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
            return None

        def do_POST(self) -> None:
            results.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        command = [*_CHROMIUM, f"--user-data-dir={profile}", f"http://127.0.0.1:{server.server_port}/"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            try:
                return json.loads(results.get(timeout=timeout))
            finally:
                browser.terminate()
                server.shutdown()

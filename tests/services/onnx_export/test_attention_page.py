"""The example page draws attention maps in a browser, with the values that ONNX Runtime gives here."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commands.browser import find_browser, running_browser
from support.models.onnx_models import Exported
from support.servers.local_http import local_http

PAGE = Path(__file__).parents[3] / "examples" / "attention_maps" / "index.html"
PACKAGES = ("onnxruntime-web", "@huggingface/tokenizers")
MAPS = {"layers": ("all",), "kinds": ("attentions",)}


class _Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        pass


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("packages")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *PACKAGES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {', '.join(PACKAGES)}: {done.stderr[-300:]}")
    yield folder / "node_modules"
    shutil.rmtree(folder)  # 150 MB


@pytest.mark.slow
def test_the_page_draws_what_the_graph_returns(
    tmp_path: Path, family: Callable[[str], Path], export: Callable[..., Exported], packages: Path
) -> None:
    import onnxruntime

    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed")
    exported = export(family("qwen3-tied"), activations=MAPS)
    site = tmp_path / "site"
    site.mkdir()
    shutil.copyfile(PAGE, site / "index.html")
    (site / "model").symlink_to(exported.folder)
    (site / "node_modules").symlink_to(packages)
    profile = tmp_path / "browser"
    profile.mkdir()
    with (
        local_http(partial(_Quiet, directory=str(site)), waits=False) as address,  # type: ignore[arg-type]
        running_browser(executable, profile) as browser,
    ):
        browser.open(f"{address}/index.html", width=1280)
        said = browser.evaluate(
            "new Promise((done) => { const look = () => window.attentionMaps || "
            "document.querySelector('#said').textContent.startsWith('It does not work') "
            "? done(document.querySelector('#said').textContent) : setTimeout(look, 50); look(); })"
        )
        assert said.startswith("2 layers,"), said
        drawn = browser.evaluate("window.attentionMaps")
        labels = [name for role, name in browser.tree() if role in ("img", "image")]
        assert labels == [f"layer {layer}, head {head}" for layer in (0, 1) for head in range(4)]
        darkest = browser.evaluate(
            "[...document.querySelectorAll('canvas')].map((canvas) => "
            "[...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data].filter((_, i) => i % 4 === 0))"
        )
        browser.evaluate("document.querySelector('form').text.value = ''; document.querySelector('button').click(); 1")
        browser.evaluate("new Promise((done) => setTimeout(done, 300))")
        assert "0 tokens" in browser.evaluate("document.querySelector('#said').textContent")
    ids = np.array([drawn["ids"]])
    graph = onnxruntime.InferenceSession(str(exported.folder / "model.onnx"), providers=["CPUExecutionProvider"])
    size = ids.shape[1]
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(size)[None]}
    feed |= {
        f"past_key_values.{n}.{part}": np.zeros((1, 2, 0, 32), np.float32) for n in (0, 1) for part in ("key", "value")
    }
    for layer, wanted in enumerate(graph.run(["attentions.0", "attentions.1"], feed)):
        found = np.array(drawn["maps"][f"attentions.{layer}"]).reshape(wanted.shape)
        assert np.abs(found - wanted).max() < 1e-4
        for head in range(4):
            shown = np.array(darkest[4 * layer + head]).reshape(size, size)
            assert np.abs(shown - 255 * (1 - np.sqrt(wanted[0, head]))).max() <= 1

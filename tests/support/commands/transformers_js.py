"""Run packaged folders by transformers.js in Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

VERSION = "4.3.1"
_PIPELINE = """
import { env, pipeline } from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = process.cwd() + "/";
const { task, dtype, text, options } = JSON.parse(process.argv[2]);
const run = await pipeline(task, "model", { dtype });
console.log(JSON.stringify(await run(text, options)));
"""


@contextmanager
def transformers_js(folder: Path) -> Iterator[Path]:
    """Install transformers.js from npm into an empty folder for the block; no package's own installation runs.

    Skip the test if that is not possible here.
    """
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm and Node.js are not installed")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    options = ("--ignore-scripts", "--no-audit", "--no-fund")
    command = ["npm", "install", *options, f"@huggingface/transformers@{VERSION}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install transformers.js: {done.stderr.splitlines()[-1:]}")
    yield folder
    shutil.rmtree(folder)  # 300 MB


def run_example(folder: Path, modules: Path, *arguments: str | Path) -> Any:
    """Run the JavaScript example of a delivered folder; return the JSON that it prints."""
    _copy(folder, modules)
    return run_node(modules, "model/example.mjs", *arguments)


def run_pipeline(folder: Path, modules: Path, **asked: Any) -> Any:
    """Run a pipeline with a delivered folder; ``asked`` has its task, dtype, text and options."""
    _copy(folder, modules)
    (modules / "pipeline.mjs").write_text(_PIPELINE)
    return run_node(modules, "pipeline.mjs", json.dumps(asked))


def _copy(folder: Path, modules: Path) -> None:
    shutil.rmtree(modules / "model", ignore_errors=True)
    shutil.copytree(folder / "transformers_js", modules / "model")


def run_node(modules: Path, *words: str | Path) -> Any:
    """Run a program in the folder with the packages; return the JSON of the last line that it prints."""
    command = ["node", *map(str, words)]
    done = subprocess.run(command, cwd=modules, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

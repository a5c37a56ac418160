"""The usage example of a GGUF file runs, with a chat template and without."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="llama.cpp runs the file: pip install 'slipway-ml[gguf]'")
from slipway.results.report import write_report
from support.commands.report_parts import result
from support.commands.usage_examples import usage_examples
from support.models.gguf_faults import save_models, write
from support.models.gguf_models import write_gguf
from support.models.gguf_readers import save_reader


@pytest.mark.slow
def test_the_example_continues_a_text(tmp_path: Path) -> None:
    """With a chat template it runs where all formats are exported at once."""
    _, _, merged = save_models(tmp_path)
    delivered = tmp_path / "delivered"
    delivered.mkdir()
    shutil.copytree(write(merged, tmp_path / "work"), delivered / "gguf")
    for chat in (True, False):
        if not chat:
            settings = delivered / "gguf" / "tokenizer_config.json"
            settings.write_text('{"bos_token": "<s>"}', encoding="utf-8")
        write_report(delivered, result=result(None, ("gguf",)))
        code = usage_examples((delivered / "README.md").read_text(encoding="utf-8"))["gguf"]
        assert ("handle_chat_completions" in code) is chat
    assert "ollama create my-model -f gguf/Modelfile" in code
    assert "llama-cli -m gguf/tiny-F16.gguf" in code
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=delivered, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "command", "words"),
    [
        ("qwen3", "--embedding\n", "handle_embeddings"),
        ("xlm-roberta-score", "--reranking\n", "handle_rerank"),
    ],
)
def test_the_example_of_a_model_that_reads_texts_runs(kind: str, command: str, words: str, tmp_path: Path) -> None:
    delivered = tmp_path / "delivered"
    delivered.mkdir()
    save_reader(kind, tmp_path / "model")
    file, _ = write_gguf(tmp_path / "model", tmp_path / "work")
    shutil.copytree(file.parent, delivered / "gguf")
    write_report(delivered, result=result(None, ("gguf",)))
    code = usage_examples((delivered / "README.md").read_text(encoding="utf-8"))["gguf"]
    assert f"llama-server -m gguf/tiny-F16.gguf {command}" in code
    assert words in code
    assert ("ollama create" in code) is (kind == "qwen3")
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=delivered, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert -1 <= float(ran.stdout.split()[0]) <= 1

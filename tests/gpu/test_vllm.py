"""vLLM on the merged folder and on the int4 folder: it answers as PyTorch does on the same folder."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import support.gpu.vllm_answers
from support.gpu.decoding import TorchModel, decode

from .conftest import Add, Model

SCRIPT = Path(support.gpu.vllm_answers.__file__)
PROMPTS, LENGTH, TOKENS = 16, 24, 16
PLACE = Path(__file__).parents[2] / ".gpu-vllm"


@pytest.mark.parametrize(("name", "same"), [("pytorch", 0.95), ("pytorch-int4", 0.9)])
def test_vllm_answers_as_pytorch_does(
    model: Model, name: str, same: float, figures: Add, needs_seconds: Callable[[float], None], tmp_path: Path
) -> None:
    """In bfloat16 nearly equal logits change places, so a share of the first tokens may differ."""
    if not (PLACE / ".installed").is_file():
        pytest.skip("not run: vLLM was not installed in time; a second run of make test-gpu has it")
    needs_seconds(60)
    text = model.prompt()
    prompts = [text[start : start + LENGTH] for start in range(0, PROMPTS * 4, 4)]
    asked, answered = tmp_path / "prompts.json", tmp_path / "answers.json"
    asked.write_text(json.dumps(prompts))
    command = [PLACE / "bin" / "python", "-P", SCRIPT, model.folder(name), "bfloat16", str(TOKENS), asked, answered]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(answered.read_text())
    torch_model = TorchModel(model.folder(name), dtype="bfloat16")
    pairs = [
        (answer["tokens"][0], decode(torch_model, prompt, steps=0, rounds=1).tokens[0])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    share = sum(one == other for one, other in pairs) / len(pairs)
    figures(model=model.name, what=f"vLLM {name}", same_tokens=share)
    assert share >= same
    assert all(value <= 0 for answer in answers for value in answer["logprobs"])

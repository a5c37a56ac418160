"""OpenVINO through the command a user types: every level passes in its own runtime, and openvino-genai runs the folders as they lie."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commands.cli import slipway
from support.commands.usage_examples import usage_examples
from support.models.judged_families import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
pytest.importorskip("slipway_openvino.library", reason="openvino is not installed", exc_type=ImportError)

OUTPUTS = ("openvino", "openvino-fp16", "openvino-int8", "openvino-int4")
QUESTION = "How do I open a file in Python?"
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def exported(
    root: Path, base: Path, checkpoint: Path, outputs: tuple[str, ...] = OUTPUTS, **more: str
) -> tuple[Path, dict[str, Any]]:
    settings = {
        "formats.onnx.enabled": "false",
        "formats.openvino.enabled": "true",
        "optimization.quantization": "fp16,int8,int4",
        "formats.pytorch.quantization": "none",
        "validation.benchmark_performance": "false",
        **more,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = ("export", "--json", "--base-model", base, "--checkpoint", checkpoint, "--out", root / "out", *words)
    done = slipway(*command, home=root / "home", timeout=1500)
    assert done.code == 0, done.err[-3000:]
    result: dict[str, Any] = done.json
    assert {name: each["status"] for name, each in result["formats"].items()} == dict.fromkeys(
        ("pytorch", *outputs), "passed"
    )
    return Path(result["output_directory"]), result


def run_examples(folder: Path, outputs: tuple[str, ...] = OUTPUTS) -> dict[str, str]:
    """Run the card's example of each output; return what it prints."""
    examples = usage_examples((folder / "README.md").read_text())
    printed = {}
    for name in outputs:
        done = subprocess.run([sys.executable, "-c", examples[name]], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed[name] = done.stdout.strip()
    return printed


@pytest.fixture(scope="module")
def sample_out(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("openvino-sample")
    folder, result = exported(root, sample / "qwen3-base", sample / "qwen3-finetuned")
    assert result["formats"]["openvino"]["mean_kl"] < 1e-4
    assert not [warning for warning in result["warnings"] if "openvino" in warning]
    return folder


def test_genai_continues_as_transformers_does(sample_out: Path) -> None:
    """Its text and rendered template are equal, with both of its ways to compute attention."""
    genai = pytest.importorskip("openvino_genai", reason="openvino-genai is not installed")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sample_out / "pytorch")
    model = AutoModelForCausalLM.from_pretrained(sample_out / "pytorch", dtype=torch.float32).eval()
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        tokens = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    wanted = tokenizer.decode(tokens, skip_special_tokens=True)
    assert wanted.strip()
    for backend in ("PA", "SDPA"):
        pipeline = genai.LLMPipeline(str(sample_out / "openvino"), "CPU", ATTENTION_BACKEND=backend, **FLOAT32)
        assert pipeline.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True) == prompt
        assert str(pipeline.generate(QUESTION, max_new_tokens=40)) == wanted


def test_the_examples_of_the_card_run(sample_out: Path) -> None:
    assert all(run_examples(sample_out).values())


def test_a_classifier_with_lora_is_exported_and_passes(tmp_path: Path) -> None:
    model = make("bert-classes", tmp_path / "bert")
    assert model.adapter is not None
    # Random weights suffer more than trained ones from 4 and 8 bits.
    limits = "int8.top1_agreement=0.95,int8.adapter_strength_error=0.06,int4.mean_kl=0.1,int4.case_mean_kl=0.2,int4.top1_agreement=0.6"
    folder, _ = exported(
        tmp_path, model.base, model.adapter, **{"validation.test_samples": "4", "validation.limits": limits}
    )
    assert all("LABEL" in shown for shown in run_examples(folder).values())


def test_a_translator_with_lora_is_exported_and_passes(tmp_path: Path) -> None:
    model = make("marian", tmp_path / "marian")
    outputs = OUTPUTS[:3]
    more = {"optimization.quantization": "fp16,int8", "validation.test_samples": "4"}
    folder, result = exported(tmp_path, model.base, model.adapter, outputs, **more)
    assert result["formats"]["openvino"]["mean_kl"] < 1e-6
    assert not [warning for warning in result["warnings"] if "openvino" in warning]
    run_examples(folder, outputs)

"""OpenVINO through the command a user types: openvino-genai runs the folder as it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands.cli import slipway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
pytest.importorskip("slipway_openvino.library", reason="openvino is not installed", exc_type=ImportError)

QUESTION = "How do I open a file in Python?"
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


@pytest.fixture(scope="module")
def sample_out(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("openvino-sample")
    settings = {
        "formats.onnx.enabled": "false",
        "formats.openvino.enabled": "true",
        "optimization.quantization": "none",
        "validation.enabled": "false",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    where = ("--base-model", sample / "qwen3-base", "--checkpoint", sample / "qwen3-finetuned", "--out", root / "out")
    done = slipway("export", "--json", *where, *words, home=root / "home", timeout=1500)
    assert done.code == 0, done.err[-3000:]
    assert not [warning for warning in done.json["warnings"] if "openvino" in warning]
    return Path(done.json["output_directory"])


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

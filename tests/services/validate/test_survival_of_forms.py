"""What stored weights hold of adapters of every form, and of models of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipway.proof.precision import stored_dtype
from slipway.validation.survival import AdapterSurvival
from slipway_validate.judging.distances import level_of
from support.models.compiler_variables import compiler_kept
from support.models.judged_families import make
from support.models.merge_forms import FORMS, save_form
from support.models.stored_survival import said, survival_of


def survival_of_form(name: str, folder: Path) -> AdapterSurvival:
    """Merge an adapter of a form by the real merge, and compare the result."""
    with compiler_kept():
        case, _ = save_form(folder, FORMS[name], torch.float32)
        merged, _ = case.merge()
        outputs = {"pytorch": merged}
        return survival_of(case.base, case.adapter, outputs)["pytorch"]


ALIKE = (
    *("rslora", "lora on Conv1D", "lora on every architecture: t5", "dora on t5", "dora on an embedding"),
    *("modules_to_save", "trainable_token_indices", "fourierft on Conv1D", "ia3", "miss, mini", "oft, constrained"),
    *("randlora", "vera, projections not saved", "pissa", "olora", "osf", "psoft", "frod"),
)
"""Forms that are compared, or refused, as another form here or as a family's adapter is."""


def test_a_form_that_takes_a_part_of_the_base_is_not_run(tmp_path: Path) -> None:
    assert "method OSF" in survival_of_form("osf", tmp_path).not_run


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, form in FORMS.items() if form.model in ("llama", "qwen3", "gpt2") and name not in ALIKE]
)
def test_every_form_of_adapter_is_right_or_not_run(name: str, tmp_path: Path) -> None:
    found = survival_of_form(name, tmp_path)
    assert found.modules or found.not_run
    assert said(found) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "marian", "t5", "whisper", "bert-classes", "bert-embeddings", "qwen3-classes"]
)
def test_every_family_holds_its_adapter_at_every_level(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    outputs = model.outputs()
    found = survival_of(model.base, model.adapter, outputs)
    for output, folder in outputs.items():
        assert found[output].modules, found[output].not_run
        assert said(found[output], level_of(stored_dtype(folder))) == ""

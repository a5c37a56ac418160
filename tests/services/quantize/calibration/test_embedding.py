"""What errors of a tied embedding count beside those of the head, against the divergence that such errors cause."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from slipway.model.folder import ModelFolder
from slipway.stage import Context
from slipway_quantize.calibration.streaming.crew import Crew
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.tuning.tuning import embedding_moments
from slipway_quantize.calibration.windows import Windows, read_windows
from support.models.calibrated_models import Material, rounded_divergence


@pytest.fixture(scope="module")
def windows(material: Material) -> Windows:
    return read_windows(material.data, ModelFolder.open(material.model), count=96, length=64, vocabulary=1024, seed=0)


def measured(material: Material, windows: Windows, *, members: int = 1) -> torch.Tensor:
    models = [StreamedModel(ModelFolder.open(material.model), group_size=32, head=True) for _ in range(members)]
    fit = list(windows.fit)
    batches = [windows.batch(fit[start : start + 4]) for start in range(0, len(fit), 4)]
    with Crew(members, threads=members) as crew:
        return embedding_moments(models, batches, crew=crew, seed=0, on_batch=lambda: None)


def test_errors_of_the_embedding_weigh_what_they_do(material: Material, windows: Windows) -> None:
    """Random errors of all rows: the divergence by the embedding is to that by the head as the traces of their moments are."""
    found = measured(material, windows)
    load = partial(tf.AutoModelForCausalLM.from_pretrained, material.model, dtype=torch.float32)
    tokens, exact = torch.stack(windows.fit), load().eval()
    weight = exact.lm_head.weight.detach()

    @torch.no_grad()
    def results(*, embedding: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        model: Any = load().eval()
        model.lm_head.weight = torch.nn.Parameter(head)
        model.get_input_embeddings().weight = torch.nn.Parameter(embedding)
        return model(tokens).logits.log_softmax(-1).double()

    reference = results(embedding=weight, head=weight)

    def divergence(**weights: torch.Tensor) -> float:
        return float((reference.exp() * (reference - results(**weights))).sum(-1).mean())

    noisy = weight + 0.003 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    ratio = divergence(embedding=noisy, head=weight) / divergence(embedding=weight, head=noisy)
    with torch.no_grad():
        inputs = exact.model(tokens).last_hidden_state.flatten(0, 1)
    expected = float(found.trace() / inputs.square().sum(-1).mean())
    assert expected == pytest.approx(ratio, rel=0.25)


def test_members_measure_the_same(material: Material, windows: Windows) -> None:
    one, two = (measured(material, windows, members=members) for members in (1, 2))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3 * float(one.abs().max()))


def test_a_tied_head_is_rounded_for_both_of_its_uses(
    material: Material, calibrate: Callable[..., tuple[Path, Context]]
) -> None:
    """The embedding's errors weigh as much as the head's; a head that is rounded by its inputs alone damages the embedding."""
    params = {"windows": 96, "time_budget_seconds": 60}
    folder, _ = calibrate(material.model, material.data, method="gptq", **params)
    simple, _ = calibrate(material.model, material.data, method="rtn", **params)
    both, rtn = (rounded_divergence(material.model, each, material.other) for each in (folder, simple))
    assert both < 0.4 * rtn

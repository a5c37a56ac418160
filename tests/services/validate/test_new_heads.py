"""A model with a new head is judged against base and adapter as peft loads them; one with a wrong head or body fails by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models.headless_bases import make_headless, trained_with_peft
from support.models.validated_here import Validated

HEADS = {
    "qwen3-tied": "score",
    "bert-pretraining": "classifier",
    "bert-tokens": "classifier",
    "bert-answers": "qa_outputs",
}


def changed(module: Any, head: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    with torch.no_grad():
        weight = module.get_submodule(head).weight
        weight.copy_(change(weight.clone()))
    return module


@pytest.mark.parametrize("kind", HEADS)
def test_the_right_head_passes_and_wrong_ones_fail(kind: str, tmp_path: Path) -> None:
    base, adapter = make_headless(kind, tmp_path)

    def merged() -> Any:
        return trained_with_peft(kind, base, adapter).merge_and_unload()

    def saved(name: str, module: Any) -> Path:
        module.save_pretrained(tmp_path / name)
        return tmp_path / name

    (tmp_path / "work").mkdir()
    right = saved("pytorch", merged())
    run = Validated(base, adapter, tmp_path / "work", merged=right)
    for name, folder in {"pytorch": right, "pytorch-fp16": saved("fp16", merged().half())}.items():
        found = run.output(name, folder)
        assert found.passed, found.explanation
        assert found.adapter_strength == pytest.approx(1, abs=0.01)
    wrong = {
        "zeroed": changed(merged(), HEADS[kind], torch.zeros_like),
        "shuffled": changed(merged(), HEADS[kind], lambda weight: weight.roll(1, 0)),
        "untrained": changed(merged(), HEADS[kind], torch.randn_like),
    }
    for name, module in wrong.items():
        found = run.output(f"pytorch-{name}", saved(name, module))
        assert not found.passed
        assert {"mean_kl", "kept"} & {check.name for check in found.failed_checks}, name
    body = trained_with_peft(kind, base, adapter)
    head = body.get_base_model().get_submodule(HEADS[kind]).modules_to_save["default"].state_dict()
    lost = body.unload()
    lost.get_submodule(HEADS[kind]).load_state_dict(head)
    found = run.output("pytorch-noop", saved("noop", lost))
    assert found.explanation.startswith("broken: it behaves like the base model: the adapter is missing from it")
    assert found.adapter_strength == pytest.approx(0, abs=0.01)

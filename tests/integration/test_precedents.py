"""The second export of a kind of model begins with what the first one found out, and ``--plan`` says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipway.planning.precedents import PRECEDENT
from support.commands.cli import Done, slipway
from support.models.table_models import ROWS, make_row

OFF = {"validation.enabled": "false", "formats.pytorch.enabled": "false"}


def other_weights(source: Path, target: Path) -> Path:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(target)
    return target


def run(root: Path, base: Path, *words: str, **settings: str) -> Done:
    assigned = [word for key, value in {**OFF, **settings}.items() for word in ("--set", f"{key}={value}")]
    return slipway(
        "export", "--json", "--base-model", base, "--checkpoint", "none", "--out", root / "out", *assigned, *words,
        home=root / "home", HOME=str(root / "home"),
    )  # fmt: skip


def onnx_attempts(done: Done) -> list[dict[str, Any]]:
    return [attempt for attempt in done.json["attempts"] if attempt["stage"] == "onnx_export"]


@pytest.mark.slow
def test_an_export_begins_with_what_worked_before(tmp_path: Path) -> None:
    """torch.export cannot trace MPT, and the legacy tracer's warnings have to be proven harmless first."""
    (tmp_path / "home").mkdir()
    first = make_row(next(row for row in ROWS if row.name == "MPT"), tmp_path / "first")
    second = other_weights(first, tmp_path / "second")
    fresh = run(tmp_path, first, "--plan")
    assert not [finding for finding in fresh.json["preflight"]["findings"] if finding["check"].startswith(PRECEDENT)]
    done = run(tmp_path, first)
    assert done.code == 0, done.err
    assert len(onnx_attempts(done)) > 2

    planned = run(tmp_path, second, "--plan")
    (found,) = (each for each in planned.json["preflight"]["findings"] if each["check"].startswith(PRECEDENT))
    assert found["message"].startswith(
        "began with what worked: engine legacy, opset 17, optimization basic, tracer_warnings prove, because dynamo failed"
    )
    (task,) = (task for task in planned.json["tasks"] if task["stage"] == "onnx_export")
    done = run(tmp_path, second)
    assert done.code == 0, done.err
    (attempt,) = onnx_attempts(done)
    assert attempt["rule"] == PRECEDENT
    assert {name: attempt["params"].get(name) for name in task["params"]} == task["params"]
    assert any("legacy tracer" in warning for warning in done.json["warnings"])

    chosen = run(tmp_path, second, "--plan", **{"recovery.profile": "aggressive"})
    assert not [finding for finding in chosen.json["preflight"]["findings"] if finding["check"].startswith(PRECEDENT)]

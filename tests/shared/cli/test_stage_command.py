"""``slipway stage``: its help lists what a stage takes, and it shows what a validation measured."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from slipway.cli.progress.display import LineDisplay
from slipway.cli.progress.lines import JsonLines
from slipway.cli.progress.reporter import StageReporter
from slipway.cli.stages.help import parameters, stage_help
from slipway.errors import StageError
from slipway.registry import load_stage, stage_names
from support.commands.cli import slipway
from support.models import tiny_models


@pytest.mark.parametrize("name", stage_names())
def test_every_parameter_of_every_stage_has_type_default_and_meaning(name: str) -> None:
    stage = load_stage(name)
    found = parameters(stage.params)
    assert [each[0] for each in found] == list(stage.params.model_fields)
    assert [(parameter, kind) for parameter, kind, _, meaning in found if not (kind and meaning)] == []
    needed = [parameter for parameter, info in stage.params.model_fields.items() if info.is_required()]
    assert [parameter for parameter, _, default, _ in found if not default] == needed
    text = "\n".join(stage_help(stage, width=80))
    assert all(word in text for word in (*stage.inputs, *stage.outputs))


@pytest.mark.parametrize("width", ["60", "100"])
def test_the_help_of_a_stage_lists_what_it_takes(tmp_path: Path, width: str) -> None:
    for words in (("stage", "onnx_export", "--help"), ("stage", "-h", "onnx_export")):
        done = slipway(*words, home=tmp_path, COLUMNS=width)
        assert done.code == 0
        for said in ("pytorch", "engine", "mobius | dynamo | legacy", 'by default "mobius"', "opset", "≥ 7 ≤ 30"):
            assert said in done.out, said
    assert "mobius" not in slipway("stage", "--help", home=tmp_path).out
    between = slipway("stage", "--out", "merged", "onnx_export", "--help", home=tmp_path, COLUMNS=width)
    assert (between.code, "mobius" in between.out) == (0, True)
    unknown = slipway("stage", "nonesuch", "--help", home=tmp_path)
    assert (unknown.code, "[STAGE_UNKNOWN]" in unknown.err) == (3, True)


@pytest.mark.slow
def test_a_validation_shows_its_figures(tmp_path: Path) -> None:
    base, run, home = tmp_path / "base", tmp_path / "run", tmp_path / "home"
    tiny_models.make_base(base)
    tiny_models.make_checkpoint(base, run)
    adapter = next(path.parent for path in run.rglob("adapter_config.json"))
    sources = ("--input", f"base={base}", "--input", f"adapter={adapter}")
    merged = slipway("stage", "merge", *sources, "--out", tmp_path / "merged", home=home)
    assert merged.code == 0, merged.err
    few = ("--param", "test_samples=2", "--param", "benchmark_performance=false", "--param", "greedy_prompts=1")
    validate = ("stage", "validate", *sources, *few, "--input")
    shown = slipway(*validate, f"pytorch={tmp_path / 'merged' / 'pytorch'}", "--out", tmp_path / "one", home=home)
    assert shown.code == 0, shown.err
    header, row = (line for line in shown.out.splitlines() if line.startswith(("output ", "pytorch ")))
    assert header.split()[:5] == ["output", "validation", "perplexity", "KL", "top-1"]
    assert row.split()[1] == "passed"
    assert "%" in row

    wrong = slipway(*validate, f"pytorch={base}", "--out", tmp_path / "two", "--json", home=home)
    assert wrong.code == 4, wrong.err
    (output,) = wrong.json["validation"]["outputs"]
    assert output["status"] == "failed"
    assert output["to_reference"]["mean_kl"] > 0


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e400", "0"])
def test_a_timeout_that_cannot_be_waited_for_is_a_usage_error(tmp_path: Path, seconds: str) -> None:
    done = slipway("stage", "merge", "--timeout", seconds, "--out", tmp_path / "out", home=tmp_path)
    assert (done.code, "--timeout" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("error", "state"), [(None, "succeeded"), (StageError("broken"), "failed"), (KeyboardInterrupt(), "cancelled")]
)
def test_an_interrupted_stage_has_not_failed(error: BaseException | None, state: str) -> None:
    stream = io.StringIO()
    display = LineDisplay(JsonLines(stream))
    with contextlib.suppress(StageError, KeyboardInterrupt), StageReporter("merge", display):
        if error is not None:
            raise error
    last = json.loads(stream.getvalue().splitlines()[-1])
    assert (last["task"], last["state"]) == ("merge", state)

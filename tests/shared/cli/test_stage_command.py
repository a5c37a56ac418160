"""``slipway stage``: its help lists what a stage takes, and it shows what a validation measured."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from pathlib import Path

import pytest

from slipway.cli.stages.commands import parameters, stage_help
from slipway.errors import StageError
from slipway.progress.display import LineDisplay, StageReporter
from slipway.progress.rendering import JsonLines
from slipway.registry import load_stage, stage_names
from support.commands.cli import in_process, slipway
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


@pytest.mark.parametrize("width", ["60", pytest.param("100", marks=pytest.mark.slow)])
def test_the_help_of_a_stage_lists_what_it_takes(tmp_path: Path, width: str) -> None:
    for words in (("stage", "onnx_export", "--help"), ("stage", "-h", "onnx_export")):
        done = slipway(*words, home=tmp_path, COLUMNS=width)
        assert done.code == 0
        for said in ("pytorch", "engine", "auto | mobius | dynamo | legacy", 'by default "auto"', "opset", "≥ 7 ≤ 30"):
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


def test_one_stage_alone(capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "text.txt").write_text("abc")
    given = ("--input", f"in={tmp_path / 'in'}", "--param", "text=hi", "--param", "seconds=0.1")
    words = ("stage", "support.stages.plain:ECHO", *given, "--out", tmp_path / "out")
    done = in_process(capfd, *words, "--json", "--progress", "json", home=home)
    assert done.code == 0, done.err
    assert done.json["facts"] == {"length": 2}
    folder = Path(done.json["outputs"]["out"])
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"text.txt": "hi", "in-text.txt": "abc"}
    events = [json.loads(line) for line in done.err.splitlines()]
    assert [event["state"] for event in events if event.get("event") == "task"] == ["running", "succeeded"]
    assert any(event.get("unit") == "ms" for event in events)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert in_process(capfd, *words, home=home).code == 3


def test_one_stage_alone_puts_signal_handlers_back(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    """The command needs its own handlers when SIGTERM arrives while outputs are moved."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "text.txt").write_text("abc")
    words = ("stage", "support.stages.plain:ECHO", "--input", f"in={tmp_path / 'in'}", "--param", "text=hi")
    before = {number: signal.signal(number, _ignored) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert in_process(capfd, *words, "--out", tmp_path / "out", home=home).code == 0
        assert {signal.getsignal(number) for number in before} == {_ignored}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignored(number: int, frame: object) -> None: ...


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nonesuch"], "STAGE_UNKNOWN"),
        (["merge", "--input", "base"], "PARAMS_INVALID"),
        (["merge", "--input", "base=/nowhere"], "INPUT_MISSING"),
        (["merge", "--input", "base=/", "--input", "base=/nowhere"], "PARAMS_INVALID"),
        (["merge", "--param", "dtype=float32", "--param", "dtype=bfloat16"], "PARAMS_INVALID"),
        (["merge", "--input", "base=/nowhere", "--input", "adapter=/nowhere"], "FILE_ERROR"),
        (["merge", "--input", "base=/", "--input", "adapter=/", "--param", "dtype=int3"], "PARAMS_INVALID"),
    ],
)
def test_a_stage_that_cannot_run_says_why(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path, words: list[str], reason: str
) -> None:
    done = in_process(capfd, "stage", *words, "--out", tmp_path / "out", "--json", home=home)
    assert (done.code, done.json["reason"]) == (3, reason)
    assert not (tmp_path / "out").exists()


def test_a_stage_that_fails_is_not_said_to_have_succeeded(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    words = ("stage", "support.stages.plain:TROUBLE", "--param", "kind=typed", "--out", tmp_path / "out", "--json")
    done = in_process(capfd, *words, home=home, SLIPWAY_PROGRESS="json")
    assert (done.code, done.json["reason"]) == (3, "ADAPTER_TENSOR_UNUSED")
    events = [json.loads(line) for line in done.err.splitlines()]
    assert (events[-1]["event"], events[-1]["reason"]) == ("error", "ADAPTER_TENSOR_UNUSED")
    last = [event for event in events if event.get("event") == "task"][-1]
    assert (last["state"], last["reason"]) == ("failed", "ADAPTER_TENSOR_UNUSED")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf"])
def test_a_timeout_is_a_finite_number(capfd: pytest.CaptureFixture[str], tmp_path: Path, seconds: str) -> None:
    for words in (
        ("stage", "merge", "--out", tmp_path / "out"),
        ("inspect", tmp_path),
        ("convert", tmp_path, "--out", tmp_path / "out"),
    ):
        done = in_process(capfd, *words, f"--timeout={seconds}", home=tmp_path / "home")
        assert done.code == 2, done.err
        assert "--timeout" in done.err

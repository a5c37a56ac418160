"""Settings that are tables or lists: timeouts, limits, adapters to combine."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipway.configuration import (
    ExportConfiguration,
    OptimizationConfiguration,
)
from slipway.configuration.sections import CombinationConfiguration
from slipway.formats.registry import formats
from slipway.formats.settings import every_choice
from slipway.planning.plan import plan
from slipway.registry import plays, stage_names
from slipway.stage import Role
from support.commands.configurations import CANONICAL, loaded, problems, write


def test_timeouts_of_stages_are_joined_row_by_row(canonical: Path) -> None:
    canonical.write_text(CANONICAL + "  resources:\n    stage_timeouts: {merge: 3600, quantize: 100}\n")
    one, other = "resources.stage_timeouts.merge=60", "export.resources.stage_timeouts.onnx_export=5"
    found = loaded(canonical, one, other, EXPORT_STAGE_TIMEOUTS="quantize=7,validate=8")
    expected = {"merge": 60, "quantize": 7, "validate": 8, "onnx_export": 5}
    assert found.configuration.resources.stage_timeouts == expected
    origin = found.origins["resources.stage_timeouts"]
    for source in ("export.yaml:", "EXPORT_STAGE_TIMEOUTS", "--set resources.stage_timeouts.merge", "onnx_export"):
        assert source in origin


@pytest.mark.parametrize(
    ("assignment", "message", "remedy"),
    [
        ("resources.stage_timeouts.mergee=60", "'mergee' is not a stage", "'merge'"),
        ("resources.stage_timeouts.onnx=60", "'onnx' is not a stage", "onnx_export"),
        ("resources.stage_timeouts.merge=soon", "'soon' is not a whole number", "digits"),
        ("resources.stage_timeouts.merge=0", "0 is less than allowed", "1"),
        ("resources.stage_timeouts=merge", "'merge' has no value", "name=60"),
        ("resources.stage_timeoutss.merge=1", "is not a setting", "resources.stage_timeouts"),
    ],
)
def test_timeouts_of_stages_that_cannot_be(canonical: Path, assignment: str, message: str, remedy: str) -> None:
    (problem,) = problems(canonical, assignment)
    assert message in problem["message"]
    assert remedy in problem["remedy"]
    assert "resources.stage_timeouts" in problem["key"]


def test_limits_come_from_every_source_and_are_joined_value_by_value(canonical: Path) -> None:
    canonical.write_text(
        CANONICAL.replace(
            "test_samples: 10,", "test_samples: 10, limits: {int4: {mean_kl: 0.03, top1_agreement: 0.8}},"
        )
    )
    found = loaded(
        canonical,
        "validation.limits.int8.perplexity_ratio=2",
        EXPORT_VALIDATION_LIMITS="int4.mean_kl=0.04, float32.max_abs_diff=1e-3",
    )
    limits = {level: row.model_dump(exclude_none=True) for level, row in found.configuration.validation.limits.items()}
    assert limits == {
        "int4": {"mean_kl": 0.04, "top1_agreement": 0.8},
        "int8": {"perplexity_ratio": 2.0},
        "float32": {"max_abs_diff": 1e-3},
    }
    for source in ("export.yaml:", "EXPORT_VALIDATION_LIMITS", "--set validation.limits.int8.perplexity_ratio"):
        assert source in found.origins["validation.limits"]
    assert not any("limits" in warning for warning in found.warnings)
    unused = loaded(canonical, "validation.limits.int8.mean_kl=2", "validation.compare_outputs=false")
    assert any("validation.limits is not applied" in warning for warning in unused.warnings)


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (("optimization.method=gptq", "optimization.quantization=fp16"), "optimization.method: gptq is not applied"),
        (
            ("validation.compare_outputs=false", "validation.test_input_samples=/questions.jsonl"),
            "validation.test_input_samples is not applied",
        ),
        (
            ("validation.enabled=false", "validation.continuation_tokens=256"),
            "validation.continuation_tokens is not applied",
        ),
    ],
)
def test_settings_without_an_effect_are_spoken_of(canonical: Path, assignments: tuple[str, ...], said: str) -> None:
    effective = ("optimization.quantization=int4", "validation.compare_outputs=true", "validation.enabled=true")
    assert any(said in warning for warning in loaded(canonical, *assignments).warnings)
    assert not any(said in warning for warning in loaded(canonical, *assignments, *effective).warnings)


@pytest.mark.parametrize(
    ("assignment", "key", "message", "remedy"),
    [
        ("validation.limits.quarter.mean_kl=1", "validation.limits", "'quarter' is not a level", "float32"),
        ("validation.limits.int8.mean_k=1", "validation.limits", "'mean_k' is not a limit", "'mean_kl'"),
        ("validation.limits.int8.mean_kl=much", "validation.limits", "'much' is not a number", "digits"),
        (
            "validation.limits.int8.mean_kl=0",
            "validation.limits.int8.mean_kl",
            "0.0 is less than allowed",
            "more than 0",
        ),
        ("validation.limits.int8.mean_kl=nan", "validation.limits.int8.mean_kl", "not a finite number", "digits"),
        (
            "validation.limits.int8.top1_agreement=95",
            "validation.limits.int8.top1_agreement",
            "more than allowed",
            "1",
        ),
        ("validation.limits.int8.perplexity_ratio=0.9", "validation.limits.int8.perplexity_ratio", "less than", "1"),
        ("validation.limits.int8=1", "validation.limits", "'int8' is a row", "int8.max_abs_diff"),
        ("validation.limits=int8", "validation.limits", "'int8' has no value", "row.name=0.1"),
    ],
)
def test_limits_that_cannot_be(canonical: Path, assignment: str, key: str, message: str, remedy: str) -> None:
    (problem,) = problems(canonical, assignment)
    assert problem["key"] == key
    assert message in problem["message"]
    assert remedy in problem["remedy"]


@pytest.mark.parametrize("row", ["int8", "{int8: 1}", "{int8: {mean_kl: '1'}}", "{int8: {mean_kl: true}}", "[int8]"])
def test_limits_of_another_form_are_refused(canonical: Path, row: str) -> None:
    canonical.write_text(CANONICAL.replace("test_samples: 10,", f"test_samples: 10, limits: {row},"))
    (problem,) = problems(canonical)
    assert problem["key"].startswith("validation.limits")
    assert "is not a" in problem["message"]
    assert "range" not in problem["message"]
    assert problem["remedy"]


def test_the_levels_of_limits_are_the_stage_s() -> None:
    from slipway.levels import STORED_TYPES
    from slipway_validate.judging.distances import LIMITS

    assert tuple(LIMITS) == STORED_TYPES


def test_stages_with_timeouts_are_those_that_are_planned() -> None:
    levels = {"pytorch": ["int8"], "gguf": ["q4_k_m"]}
    given = {name: {"quantization": found} for name, found in levels.items()}
    everything = ExportConfiguration(
        combination=CombinationConfiguration(adapters=("other",)),
        formats={
            name: {"enabled": True} | every_choice(each.settings) | given.get(name, {})
            for name, each in formats().items()
        },
        optimization=OptimizationConfiguration(method="gptq", calibration="text"),
    )
    inputs = {"base", "adapter", "adapter-02", "calibration"}
    tasks = plan(everything, inputs, source_formats={"base": "gptq"})
    others = {name for name in stage_names() if plays(name, Role.CONVERSION, Role.ANSWERING)}  # of no export
    assert {task.stage for task in tasks} == set(stage_names()) - others


def test_adapters_to_combine_are_paths_from_the_files_folder(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
export:
  checkpoint: {path: runs/a}
  combination: {adapters: [runs/b, "s3://bucket/runs/c"], weights: [1, 0.5, -0.25], type: ties}
""",
    )
    combination = loaded(path, "combination.density=0.3").configuration.combination
    assert combination.adapters == (str(tmp_path / "runs/b"), "s3://bucket/runs/c")
    assert combination.weights == (1.0, 0.5, -0.25)
    assert (combination.type, combination.density) == ("ties", 0.3)


@pytest.mark.parametrize(
    ("assignments", "message", "remedy"),
    [
        (["combination.weights=1,2"], "there are 2 weights for no adapters", "combination.adapters"),
        (["combination.adapters=b", "combination.weights=1"], "there is 1 weight for 2 adapters", "[1.0, 1.0]"),
        (["combination.adapters=b", "combination.weights=1,much"], "'much' is not a number", "digits"),
        (["combination.density=0"], "density", "0"),
        (["combination.type=sum"], "sum", "cat"),
    ],
)
def test_combinations_that_cannot_be(canonical: Path, assignments: list[str], message: str, remedy: str) -> None:
    (problem,) = problems(canonical, *assignments)
    assert message in f"{problem['key']} {problem['message']}"
    assert remedy in f"{problem['message']} {problem['remedy']}"


@pytest.mark.parametrize(
    ("written", "assignments", "expected"),
    [
        ("{layers: [0, 5, 11], kinds: [attentions]}", (), {"layers": ("0", "5", "11"), "kinds": ("attentions",)}),
        ("{layers: last}", ("kinds=mlp,embeddings",), {"layers": ("last",), "kinds": ("mlp", "embeddings")}),
        ("{kinds: mlp}", ("layers=1,2,kinds=attentions",), {"layers": ("1", "2"), "kinds": ("attentions",)}),
    ],
)
def test_activations_come_from_file_and_text(
    canonical: Path, written: str, assignments: tuple[str, ...], expected: dict[str, tuple[str, ...]]
) -> None:
    canonical.write_text(CANONICAL.replace("onnx: {", f"onnx: {{activations: {written}, "))
    given = [f"formats.onnx.activations{'=' if text.count('=') > 1 else '.'}{text}" for text in assignments]
    configuration = loaded(canonical, *given).configuration
    assert configuration.formats["onnx"].activations == expected
    (task,) = [task for task in plan(configuration, {"base", "adapter"}) if task.id == "onnx_export"]
    assert task.params["activations"] == {name: list(part) for name, part in expected.items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers=x", "'x' is not a layer"),
        ("layers=-1", "'-1' is not a layer"),
        ("kinds=attention", "'attention' is not a kind of activations"),
        ("layer=1", "'layer' is not a part of activations"),
        ("1,2", "'1' has no name"),
    ],
)
def test_activations_that_cannot_be(canonical: Path, text: str, message: str) -> None:
    (problem,) = problems(canonical, f"formats.onnx.activations={text}")
    assert message in problem["message"]


def test_without_activations_the_plan_is_the_same(canonical: Path) -> None:
    (task,) = [task for task in plan(loaded(canonical).configuration, {"base", "adapter"}) if task.id == "onnx_export"]
    assert "activations" not in task.params

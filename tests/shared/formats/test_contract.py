"""Formats by their contract: found by name, refused where they cannot be used, light."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from slipway.configuration import parse
from slipway.errors import ConfigurationError
from slipway.formats import (
    Format,
    FormatSettings,
    LevelSettings,
    PlannedTask,
    Quantization,
    Runtime,
    SectionRules,
    Variants,
    registry,
)
from slipway.formats.registry import format_of_output, formats, load_format, merged_output, split_output
from slipway.machine import doctor
from slipway.planning.plan import format_tasks, plan
from slipway.stage import Role

HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "tensorrt", "numpy", "grpc", "dbos")


def plain(**changes: Any) -> Format[Any]:
    given = {"name": "plain", "title": "Plain", "settings": FormatSettings, "plan": lambda _: ()}
    return Format(**{**given, **changes})


def runtime(pattern: str, *, load: str = "module:load") -> Runtime:
    return Runtime("mine", (pattern,), load, on_base=True)


def test_a_variant_has_its_own_runtime_or_that_of_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    own, beside = runtime("model.bin"), runtime("beside.bin")
    each = plain(runtime=own, variants=Variants(runtimes={"beside": beside}), levels=("int8",), settings=LevelSettings)
    monkeypatch.setattr(registry, "formats", lambda: {"plain": each})  # what an installed distribution would provide
    found = {
        name: registry.runtime_of_output(name) for name in ("plain", "plain-int8", "plain-beside", "plain-other", "x")
    }
    assert list(found.values()) == [own, own, beside, own, None]
    assert each.runtimes() == (beside, own)
    alone = [name for name in found if registry.is_adapter_alone(name)]
    assert alone == ["plain", "plain-int8", "plain-beside"]


def test_holding_every_format_imports_nothing_heavy() -> None:
    code = (
        "import sys; from slipway.configuration import ExportConfiguration; from slipway.planning.plan import plan;"
        "plan(ExportConfiguration(), ['base', 'adapter']);"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True) == "[]\n"


def test_formats_are_found_by_the_names_of_their_outputs() -> None:
    assert list(formats())[:3] == ["pytorch", "onnx", "tensorrt"]
    assert split_output("onnx-int8") == ("onnx", "int8")
    assert format_of_output("onnx-int8") is load_format("onnx")
    assert format_of_output("nonesuch-int8") is None
    assert merged_output() == "pytorch"
    with pytest.raises(ConfigurationError) as caught:
        load_format("onx")
    assert (caught.value.reason, caught.value.remedy) == ("FORMAT_UNKNOWN", "did you mean 'onnx'?")


@pytest.mark.parametrize("each", formats().values(), ids=lambda each: each.name)
def test_what_a_format_names_is_there(each: Format[Any]) -> None:
    named = [each.quantization.quantizer, *(runtime.load for runtime in each.runtimes())]
    for reference in filter(None, named):
        module, _, attribute = reference.partition(":")
        try:
            assert hasattr(import_module(module), attribute)
        except ImportError as error:
            assert error.name in {"tensorrt", "tensorrt_rtx", "executorch", "coremltools", "ai_edge_litert"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "with-hyphen"}, "cannot be a format's name"),
        ({"name": "heldout"}, "cannot be a format's name"),
        ({"name": "reference"}, "cannot be a format's name"),
        ({"name": "before"}, "cannot be a format's name"),
        ({"name": "model_dump"}, "cannot be a format's name"),
        ({"name": "Onnx"}, "cannot be a format's name"),
        ({"levels": ("int8",)}, "is not a LevelSettings"),
        ({"levels": ("none",), "settings": LevelSettings}, "cannot be a level's name"),
        ({"rules": SectionRules(variables={"nonesuch": "EXPORT_X"})}, "which is not a setting"),
        ({"quantization": Quantization(quantizer="module.without.attribute")}, "is not module:attribute"),
        ({"variants": Variants(runtimes={"beside": runtime("*.gguf", load="nothing")})}, "is not module:attribute"),
        ({"variants": Variants(runtimes={"With-Hyphen": runtime("*.gguf")})}, "cannot be a level's name"),
        (
            {"levels": ("x",), "settings": LevelSettings, "variants": Variants(runtimes={"x": runtime("*")})},
            "cannot be a level's name",
        ),
    ],
)
def test_a_value_that_could_not_be_used_later_is_refused_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain(**changes)


def test_without_any_format_it_is_said_how_to_get_some(monkeypatch: pytest.MonkeyPatch) -> None:
    # Slipway's own entry points cannot be uninstalled for one test; an empty list stands in for that.
    monkeypatch.setattr(registry, "installed_entry_points", lambda _: [])
    registry._installed.cache_clear()
    with pytest.raises(ConfigurationError, match="no format is installed"):
        formats()
    registry._installed.cache_clear()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (PlannedTask("x", "s", {}, {"model": "task:other/model"}, output="o"), "uses 'task:other/model'"),
        (PlannedTask("merge", "s", {}, {"model": "source:m"}, output="o"), "has the id of another task"),
        (PlannedTask("x", "s", {}, {"model": "source:m"}, format="onnx", output="o"), "delivers 'onnx'"),
        (PlannedTask("x", "s", {}, {"model": "source:m"}, format="plain-int8", output="o"), "delivers 'plain-int8'"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(task: PlannedTask, message: str) -> None:
    each = replace(
        load_format("tensorrt"), plan=lambda _: (replace(task, format=task.format.replace("plain", "tensorrt")),)
    )
    section = each.settings(enabled=True)
    with pytest.raises(ConfigurationError, match=message.replace("plain", "tensorrt")) as caught:
        format_tasks(each, section, parse({}), model="source:m", taken={"merge"})
    assert caught.value.reason == "FORMAT_INVALID"


def test_whatever_a_formats_functions_raise_is_an_error_with_its_name() -> None:
    each = replace(load_format("tensorrt"), plan=lambda request: request.nonesuch)
    with pytest.raises(ConfigurationError, match="the format tensorrt fails: AttributeError") as caught:
        format_tasks(each, each.settings(enabled=True), parse({}), model="source:m")
    assert caught.value.reason == "FORMAT_INVALID"


def test_a_question_that_a_format_fails_to_answer_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    each = replace(load_format("onnx"), needs_tokenizer=lambda settings: settings.nonesuch)
    monkeypatch.setitem(formats(), "onnx", each)  # stands in for a distribution with this fault
    with pytest.raises(ConfigurationError, match="the format onnx fails: AttributeError"):
        plan(parse({}), ["base", "adapter"])


def test_a_format_without_its_unquantized_output_keeps_the_task_that_its_levels_need() -> None:
    data = {"formats": {name: {"unquantized": False, "quantization": "int8"} for name in ("pytorch", "onnx")}}
    tasks = {task.id: task for task in plan(parse(data), ["base", "adapter"])}
    assert [task.format for task in tasks.values()] == ["", "pytorch-int8", "", "onnx-int8", "", "validation"]
    merged = {"pytorch": "task:merge/pytorch", "adapter": "source:adapter", "base": "source:base"}  # without weights
    assert tasks["quantize-onnx-int8"].inputs == {"model": "task:onnx_export/onnx", **merged}
    assert set(tasks["validate"].inputs) == {"base", "adapter", "reference", "pytorch-int8", "onnx-int8"}


def test_nothing_but_an_unquantized_output_that_is_not_wanted_is_a_conflict() -> None:
    with pytest.raises(ConfigurationError, match=r"formats\.onnx\.unquantized"):
        parse({"formats": {"onnx": {"unquantized": False}}})


def test_doctor_says_of_each_variant_what_its_own_stages_lack() -> None:
    found = {each.name: each.detail for each in doctor.format_health(())}
    assert found["adapter"] == "adapter cannot run: not installed"
    assert found["adapter-gguf"] == "adapter cannot run: not installed; gguf_adapter cannot run: not installed"
    assert found["adapter-onnx"].startswith("onnx_export cannot run")
    assert found["pytorch"] == "merge cannot run: not installed"
    assert found["onnx-<level>"].split("; ")[0] == "merge cannot run: not installed"


def test_every_role_is_played_by_one_installed_stage() -> None:
    from slipway.registry import known_stage, stage_names

    players = [stage.role for name in stage_names() if (stage := known_stage(name)) is not None and stage.role]
    assert sorted(players, key=lambda role: role.value) == list(Role)

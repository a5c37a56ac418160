"""Formats as messages: what is right of every installed one, and formats of others that fail, hang on to too much or cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from slipway.configuration import ExportConfiguration
from slipway.errors import Failure, ServiceError
from slipway.formats import registry
from slipway.formats.registry import formats
from slipway.requirements import Placement
from slipway.rpc.formats import MOST_SCHEMA_BYTES, describe_formats
from slipway.rpc.values import dict_of, failure_of_status
from slipway_protos.v1 import coordinator_pb2 as pb
from support.commands.distributions import install_format

CODE = """
from typing import Any
from pydantic import Field
from slipway.formats import Format, FormatSettings, LevelSettings, PlannedTask, Fit

class Settings(LevelSettings):
    '''Settings.

    Attributes:
        squeeze: Whether it is
            squeezed.
    '''
    squeeze: bool = False
{more}

def plan(request):
{plan}

FORMAT = Format(name="npz", title="T", settings=Settings, plan=plan, levels=("int8", "int4"),
    fits=(Fit("edge", "second", rank=60), Fit("browser", "first", levels=("int8", ""), rank=10)))
"""
PLAN = """
    yield PlannedTask(id="npz", stage="pack", params={"a": 1}, inputs={"model": request.model}, format="npz", output="npz")
    for level in request.levels:
        if level == "int4":
            raise RuntimeError("no \\x1b[2J int4")
        yield PlannedTask(id=f"q-{level}", stage="press", params={}, inputs={"npz": "task:npz/npz"}, format=f"npz-{level}", output="o")
"""

Install = Callable[..., dict[str, pb.Format]]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a format of another distribution; return all formats as messages, where no task is possible."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(code: str) -> dict[str, pb.Format]:
        module = f"npz_of_{tmp_path.name}".replace("-", "_")
        install_format(tmp_path, "npz-format", name="npz", module=module, code=code)
        registry._installed.cache_clear()
        describe_formats.cache_clear()
        return {each.name: each.judged(refuse) for each in describe_formats()}

    yield install
    monkeypatch.undo()
    registry._installed.cache_clear()
    describe_formats.cache_clear()


def refuse(task: Placement) -> Failure | None:
    return ServiceError(f"nobody runs {task.stage}", reason="NO_WORKER", about={"stage": task.stage}).failure()


def code(*, more: str = "", plan: str = PLAN) -> str:
    return CODE.replace("{more}", more).replace("{plan}", plan)


def test_every_installed_format_has_a_schema_that_its_settings_meet() -> None:
    for each in describe_formats():
        schema = dict_of(each.message.settings_schema)
        Draft202012Validator.check_schema(schema)
        settings = formats()[each.name].settings()
        Draft202012Validator(schema).validate(json.loads(settings.model_dump_json()))
        assert not Draft202012Validator(schema).is_valid({"unknown": 1})
        assert not Draft202012Validator(schema).is_valid({"enabled": "perhaps"})
        assert all("description" in one for name, one in schema["properties"].items()), each.name
        assert len(json.dumps(schema)) < MOST_SCHEMA_BYTES
        possible = each.judged(lambda _: None)
        assert possible.available
        assert all(level.available and level.stages for level in possible.levels)
        assert not each.message.stages, "what is cached stays as it is"


@pytest.mark.parametrize(
    ("name", "settings", "valid"),
    [
        ("tensorrt", {"batch": [1, 1, 8]}, True),
        ("tensorrt", {"batch": {"min": 1, "opt": 1, "max": 8}}, True),
        ("tensorrt", {"batch": [1, 8]}, False),
        ("tensorrt", {"batch": {"min": 1}}, False),
        ("tensorrt", {"sequence": [1, "x", 8]}, False),
        ("tensorrt", {"quantization": ["fp16", "int8_static"]}, True),
        ("onnx", {"static_shape": [1, 1, 0]}, True),
        ("onnx", {"static_shape": {"batch": 1, "sequence": 16}}, True),
        ("onnx", {"static_shape": {"input_ids": {"sequence": 16}, "past_key_values": {"past_sequence": 240}}}, True),
        ("onnx", {"static_shape": {"input_ids.sequence": 16, "past_sequence": 240}}, True),
        ("onnx", {"static_shape": {"total_sequence": 8}}, True),
        ("onnx", {"static_shape": {"height": 1}}, False),
        ("onnx", {"static_shape": {"input_ids": {"height": 1}}}, False),
        ("onnx", {"static_shape": [0, 1, 1]}, False),
        ("onnx", {"static_shape": [1, 1]}, False),
        ("onnx", {"activations": {"layers": [0, 5, 11], "kinds": ["attentions"]}}, True),
        ("onnx", {"activations": {"layers": "all"}}, True),
        ("onnx", {"activations": {"layers": ["0", "last"], "kinds": "hidden_states"}}, True),
        ("onnx", {"activations": {"layers": ["first"]}}, False),
        ("onnx", {"activations": {"kinds": ["thoughts"]}}, False),
        ("onnx", {"activations": {"rows": [1]}}, False),
        ("onnx", {"opset_version": 0}, True),
        ("onnx", {"opset_version": 17}, True),
        ("onnx", {"opset_version": 26}, True),
        ("onnx", {"opset_version": 99}, False),
        ("onnx", {"opset_version": 6}, False),
        ("gguf", {"quantization": "q4_k_m"}, True),
        ("gguf", {"quantization": ["q4_k_m", "f16"]}, True),
        ("gguf", {"quantization": "none"}, True),
        ("gguf", {"quantization": None}, True),
        ("gguf", {"quantization": ["nonsense"]}, False),
        ("gguf", {"quantization": ["int4"]}, False),
    ],
)
def test_a_schema_and_the_configuration_take_the_same(name: str, settings: dict[str, object], *, valid: bool) -> None:
    (each,) = (each for each in describe_formats() if each.name == name)
    assert Draft202012Validator(dict_of(each.message.settings_schema)).is_valid(settings) is valid
    configuration = {"formats": {name: {"enabled": True, **settings}}}
    if valid:
        ExportConfiguration.model_validate(configuration)
        return
    with pytest.raises(ValidationError):
        ExportConfiguration.model_validate(configuration)


def test_a_format_of_another_distribution_is_described_like_any_other(install: Install) -> None:
    npz = install(code())["npz"]
    assert (npz.title, list(npz.stages)) == ("T", ["merge", "pack"])
    assert [(target.name, target.why, list(target.levels)) for target in npz.targets] == [
        ("browser", "first", ["int8", ""]),
        ("edge", "second", [""]),
    ]
    int8, int4 = npz.levels
    assert list(int8.stages) == ["merge", "pack", "press"]
    assert failure_of_status(npz.obstacle).about["stage"] == "merge"
    assert (list(int4.stages), int4.available) == ([], False)
    failure = failure_of_status(int4.obstacle)
    assert (failure.reason, failure.about["format"]) == ("FORMAT_INVALID", "npz")
    schema = dict_of(npz.settings_schema)
    assert schema["properties"]["squeeze"]["description"] == "Whether it is squeezed."


@pytest.mark.parametrize(
    "more",
    [
        "    odd: Any = Field(default=None, json_schema_extra={'x': object()})",
        "    odd: Any = Field(default=None, json_schema_extra=lambda _: 1 / 0)",
        f"    odd: str = Field(default='', description='d' * {MOST_SCHEMA_BYTES})",
    ],
    ids=["no JSON", "fails", "large"],
)
def test_settings_that_cannot_be_described_leave_the_rest(install: Install, more: str) -> None:
    npz = install(code(more=more))["npz"]
    assert not npz.HasField("settings_schema")
    assert [level.name for level in npz.levels] == ["int8", "int4"]


def test_a_plan_that_fails_is_the_obstacle(install: Install) -> None:
    npz = install(code(plan="    raise SystemError('at all')\n"))["npz"]
    assert failure_of_status(npz.obstacle).reason == "FORMAT_INVALID"
    assert "at all" in failure_of_status(npz.obstacle).message


def test_a_format_that_cannot_be_used_comes_last_with_the_reason(install: Install) -> None:
    found = install("import a_library_that_is_not_there")
    assert list(found)[-1] == "npz"
    failure = failure_of_status(found["npz"].obstacle)
    assert (failure.reason, failure.about["distribution"]) == ("FORMAT_INVALID", "npz-format")
    assert "a_library_that_is_not_there" in failure.message
    assert not found["npz"].available

"""The export configuration: what loads, which source wins, and that every problem is reported at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipway.configuration import (
    ENVIRONMENT,
    ExportConfiguration,
    load,
    parse,
    render_name,
)
from slipway.configuration.schema import keys, sections
from slipway.errors import ConfigurationError
from slipway.planning.plan import plan
from slipway_protos.v1 import configuration_pb2
from support.commands.configurations import CANONICAL, loaded, problems, write


def test_the_documented_file_loads_as_it_stands(canonical: Path) -> None:
    configuration = loaded(canonical).configuration
    assert configuration.base_model.name == "Qwen/Qwen3-4B-Thinking-2507"
    assert configuration.optimization.quantization == ("int8",)
    assert configuration.formats.onnx.opset_version == 14
    assert configuration.levels("pytorch") == configuration.levels("onnx") == ("int8",)
    assert not configuration.formats.tensorrt.enabled


def test_later_sources_win_setting_by_setting(canonical: Path) -> None:
    environment = {"EXPORT_QUANTIZATION_LEVEL": "int4,int8", "EXPORT_LOG_LEVEL": "debug", "EXPORT_ENABLE_ONNX": "no"}
    found = loaded(canonical, "log.level=error", **environment)
    assert found.configuration.optimization.quantization == ("int4", "int8")
    assert found.configuration.log.level == "error"
    assert found.configuration.formats.onnx.enabled is False
    assert found.configuration.formats.onnx.opset_version == 14
    origins = found.origins
    assert origins["log.level"] == "--set log.level"
    assert origins["optimization.quantization"] == "EXPORT_QUANTIZATION_LEVEL"
    assert origins["checkpoint.path"] == "export.yaml:2"
    assert origins["recovery.profile"] == "default"


@pytest.mark.parametrize("level", ["INFO", "info", "Info"])
def test_the_log_level_is_taken_in_any_case_from_every_source(tmp_path: Path, level: str) -> None:
    file = write(tmp_path, f"export: {{checkpoint: {{path: run}}, log: {{level: {level}}}}}")
    in_yaml = loaded(file)
    bare = write(tmp_path, "export: {checkpoint: {path: run}}")
    for found in (in_yaml, loaded(bare, EXPORT_LOG_LEVEL=level), loaded(bare, f"log.level={level}")):
        assert found.configuration.log.level == "info"
    assert parse({"log": {"level": level}}).log.level == "info"


def test_relative_paths_start_where_they_were_written(canonical: Path, tmp_path: Path) -> None:
    from_file = load(canonical, environment={}, folder=tmp_path).configuration
    assert from_file.checkpoint.path == str(canonical.parent / "qwen3-finetuned")
    assert from_file.output.directory == str(canonical.parent / "exported_models")
    flags = {"--checkpoint": "run", "--out": "out", "--base-model": None}
    from_flags = load(canonical, environment={}, flags=flags, folder=tmp_path).configuration
    assert (from_flags.checkpoint.path, from_flags.output.directory) == (str(tmp_path / "run"), str(tmp_path / "out"))
    nothing = load(None, environment={"EXPORT_CHECKPOINT_PATH": "run"}, folder=tmp_path).configuration
    assert nothing.output.directory == str(tmp_path / "exported_models")


def test_a_base_model_is_a_path_only_when_it_is_there_or_looks_like_one(canonical: Path) -> None:
    (canonical.parent / "base").mkdir()
    for name, expected in (
        ("base", str(canonical.parent / "base")),
        ("./absent", str(canonical.parent / "absent")),
        ("org/model", "org/model"),
    ):
        canonical.write_text(CANONICAL.replace("Qwen/Qwen3-4B-Thinking-2507", name))
        assert loaded(canonical).configuration.base_model.name == expected


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("formats.tensorrt.targets", "sm89,sm80", ("sm89", "sm80")),
        ("formats.pytorch.quantization", "none", ()),
        ("optimization.quantization", "[fp16, int8]", ("fp16", "int8")),
        ("resources.max_memory_bytes", "8GiB", 8 << 30),
        ("resources.max_memory_bytes", "1.5G", 1_500_000_000),
        ("checkpoint.auto_detect_latest", "off", False),
        ("resources.stage_timeouts", "merge=3600, validate=60", {"merge": 3600, "validate": 60}),
    ],
)
def test_texts_become_values_of_the_setting_s_type(canonical: Path, key: str, text: str, value: Any) -> None:
    configuration: Any = loaded(canonical, f"{key}={text}").configuration
    for part in key.split("."):
        configuration = getattr(configuration, part)
    assert configuration == value


def test_everything_wrong_is_reported_at_once_with_its_source_and_remedy(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
export:
  checkpont: {path: x}
  optimization:
    quantization: [int8, int5]
    group_size: 33
    remove_artifacts: false
  formats:
    pytorch: {enabled: "true"}
    onnx: {opset: 3, opset_version: 99, quantization: bf16}
    tensorrt: {enabled: yes, batch: [3, 2, 1], sequence: 4, targets: [ada]}
  validation: {test_samples: 0, test_samples: 0}
  output: {naming_pattern: "{model}/x"}
  log: {level: loud}
other: 3
""",
    )
    found = problems(path, "a.b=c", "x", EXPORT_ENABLE_ONXX="1", EXPORT_THREADS="many")
    by_key = {problem["key"]: problem for problem in found}
    expected = {
        "checkpont": ("export.yaml:2", "checkpoint"),
        "optimization.quantization": ("export.yaml:4", "int4"),
        "optimization.group_size": ("export.yaml:5", "32"),
        "optimization.remove_artifacts": ("export.yaml:6", "true"),
        "formats.pytorch.enabled": ("export.yaml:8", "without quotes"),
        "formats.onnx.opset": ("export.yaml:9", "opset_version"),
        "formats.onnx.opset_version": ("export.yaml:9", "14 to 24"),
        "formats.onnx.quantization": ("export.yaml:9", "fp16"),
        "formats.tensorrt.batch": ("export.yaml:10", "[1, 1, 8]"),
        "formats.tensorrt.sequence": ("export.yaml:10", "[min, opt, max]"),
        "formats.tensorrt.targets": ("export.yaml:10", "sm89"),
        "output.naming_pattern": ("export.yaml:12", "{timestamp}"),
        "log.level": ("export.yaml:13", "debug"),
        "other": ("export.yaml:14", "export:"),
        "EXPORT_ENABLE_ONXX": ("environment", "EXPORT_ENABLE_ONNX"),
        "resources.threads": ("EXPORT_THREADS", "digits"),
        "a.b": ("--set a.b", ""),
        "x": ("--set", "x=VALUE"),
        "checkpoint.path": ("", "--checkpoint"),
    }
    assert {key: (value["source"], True) for key, value in by_key.items() if key in expected} == {
        key: (source, True) for key, (source, _) in expected.items()
    }
    for key, (_, remedy) in expected.items():
        assert remedy in by_key[key]["message"] + by_key[key]["remedy"], key
    assert {problem["message"] for problem in found if problem["key"] == "validation.test_samples"} == {
        "is given twice",
        "0 is less than allowed",
    }


@pytest.mark.parametrize(
    ("assignments", "key", "remedy"),
    [
        (["formats.pytorch.enabled=false", "formats.onnx.enabled=false"], "formats", "formats.pytorch.enabled: true"),
        (
            ["optimization.quantization=bf16,int8"],
            "optimization.quantization",
            "formats.onnx.quantization: [fp16, int8]",
        ),
        (
            ["formats.tensorrt.enabled=true", "formats.tensorrt.builder=tensorrt", "formats.tensorrt.targets=sm89"],
            "formats.tensorrt.targets",
            "tensorrt_rtx",
        ),
    ],
)
def test_conflicts_name_a_setting_that_works(canonical: Path, assignments: list[str], key: str, remedy: str) -> None:
    (problem,) = problems(canonical, *assignments)
    assert problem["key"] == key
    assert remedy in problem["remedy"]


def test_the_remedy_of_a_conflict_works(canonical: Path) -> None:
    settings = ["optimization.quantization=bf16,int8", "formats.onnx.quantization=fp16,int8"]
    configuration = loaded(canonical, *settings).configuration
    assert (configuration.levels("pytorch"), configuration.levels("onnx")) == (("bf16", "int8"), ("fp16", "int8"))


def test_a_model_made_in_code_has_no_conflicts_either() -> None:
    with pytest.raises(ValueError, match="no format is enabled"):
        ExportConfiguration.model_validate({"formats": {"pytorch": {"enabled": False}, "onnx": {"enabled": False}}})


def test_a_variable_of_another_program_is_a_warning(canonical: Path) -> None:
    assert any("EXPORT_TZ" in warning for warning in loaded(canonical, EXPORT_TZ="UTC").warnings)


def test_an_empty_variable_is_not_set(canonical: Path) -> None:
    assert loaded(canonical, EXPORT_ENABLE_ONNX="").configuration.formats.onnx.enabled


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("export: [1, 2", "is not YAML"),
        ("", "no export section"),
        ("export: 3", "is a section"),
        ("checkpoint: {path: x}", "no export section"),
        ("export: {output: {directory: !!python/object/apply:os.getcwd []}}", "a tag"),
        ("export: {formats: 3}", "is a section"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        loaded(write(tmp_path, text), "checkpoint.path=x")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        loaded(tmp_path / "absent.yaml")
    assert caught.value.reason == "CONFIGURATION_NOT_FOUND"
    assert "absent.yaml" in caught.value.message


@given(
    st.dictionaries(st.text(min_size=1, max_size=12), st.none() | st.integers() | st.text() | st.booleans(), min_size=1)
)
def test_no_unknown_key_passes_unnoticed(data: dict[str, Any]) -> None:
    unknown = {name: value for name, value in data.items() if name not in sections()[""]}
    for path in sections():
        nested: dict[str, Any] = dict(unknown)
        known = set(sections()[path])
        if path in keys() or not set(nested) - known:
            continue
        for part in reversed(path.split(".") if path else []):
            nested = {part: nested}
        with pytest.raises(ConfigurationError) as caught:
            parse(nested)
        reported = {problem["key"] for problem in json.loads(caught.value.about["problems"])}
        assert {f"{path}.{name}" if path else name for name in set(unknown) - known} <= reported


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x, max_size=3))
)
def test_any_value_of_any_setting_is_taken_or_reported(value: Any) -> None:
    for key in keys():
        nested: Any = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        try:
            configuration: Any = parse(nested)
        except ConfigurationError as error:
            assert [problem["key"] for problem in json.loads(error.about["problems"])] == [key]
            continue
        assert isinstance(configuration, ExportConfiguration)


def test_every_setting_has_one_variable() -> None:
    assert sorted(ENVIRONMENT.values()) == sorted(keys())


def test_names_of_output_directories() -> None:
    values = {"model_name": "my/model v2", "timestamp": "20260102_030405", "checkpoint": "..", "export_id": "e-1"}
    assert render_name("{model_name}_{timestamp}-{checkpoint}", values) == "my-model-v2_20260102_030405-model"


def _fields(model: type, message: Any, path: str = "") -> list[str]:
    """Return the differences between the fields of a model and of a message, by path."""
    names = {field.name for field in message.fields}
    own = set(model.model_fields)
    found = [f"{path}{name}" for name in sorted(names ^ own)]
    for name in sorted(names & own - {"formats"}):  # by name, the rest checked by the formats' own models
        nested = getattr(model(), name, None)
        field = message.fields_by_name[name]
        if hasattr(type(nested), "model_fields"):
            found += _fields(type(nested), field.message_type, f"{path}{name}.")
        elif field.message_type is None or field.message_type.name in {"QuantizationLevels", "Value"}:
            continue
        elif not (isinstance(nested, dict) and field.message_type.GetOptions().map_entry):
            found.append(f"{path}{name} is a message without a model")
    return found


def test_the_model_and_the_message_have_the_same_fields() -> None:
    assert _fields(ExportConfiguration, configuration_pb2.ExportConfiguration.DESCRIPTOR) == []


def test_a_configuration_survives_the_wire(canonical: Path) -> None:
    from slipway.rpc.messages import configuration_message, configuration_of

    settings = ["formats.tensorrt.batch=1,2,4", "formats.onnx.quantization=none", "formats.tensorrt.targets=sm89"]
    configuration = loaded(canonical, *settings).configuration
    assert configuration_of(configuration_message(configuration)) == configuration
    assert configuration_of(configuration_pb2.ExportConfiguration()) == ExportConfiguration()


@pytest.mark.parametrize("path", ["none", "None", "", None])
def test_a_base_model_without_a_checkpoint_is_exported_as_it_is(tmp_path: Path, path: str | None) -> None:
    checkpoint = "" if path is None else f"  checkpoint: {{path: '{path}'}}\n"
    configuration = loaded(write(tmp_path, f"export:\n{checkpoint}  base_model: {{name: owner/model}}\n")).configuration
    assert configuration.checkpoint.path == ""
    assert configuration.base_model.name == "owner/model"
    assert plan(configuration, {"base"})[0].stage == "prepare"


def test_a_folder_may_be_called_none(tmp_path: Path) -> None:
    found = loaded(write(tmp_path, "export:\n  checkpoint: {path: ./none}\n  base_model: {name: owner/model}\n"))
    assert found.configuration.checkpoint.path == str(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ("export:\n  log: {level: info}\n", "checkpoint.path", "base_model.name"),
        ("export:\n  checkpoint: {path: none}\n", "checkpoint.path", "--checkpoint"),
        (
            "export:\n  base_model: {name: owner/model}\n  combination: {adapters: [other]}\n",
            "combination.adapters",
            "checkpoint.path",
        ),
        (
            "export:\n  base_model: {name: owner/model, load_in_4bit: true, merge_onto: nf4}\n",
            "base_model.merge_onto",
            "original",
        ),
    ],
)
def test_what_needs_a_checkpoint_says_so(tmp_path: Path, text: str, key: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        loaded(write(tmp_path, text))
    assert f"{key}: " in caught.value.message
    assert remedy in caught.value.message + caught.value.remedy

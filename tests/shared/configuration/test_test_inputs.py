"""Test inputs as a setting: a path or a list, the same after any way it travels, refused with a form that works."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slipway.configuration import load, parse
from slipway.configuration.values import LARGEST_TEST_INPUTS, MOST_TEST_INPUTS
from slipway.errors import ConfigurationError
from slipway.export_sources.naming import source_settings
from slipway.planning.plan import plan
from slipway.rpc.messages import configuration_message, configuration_of
from slipway.validation.inputs import LARGEST, find_test_inputs

LIST = [{"prompt": "1 + 1 =", "expected": "2"}, {"text": "a", "label": 1, "score": 0.5, "tokens": ["a", "b"]}]


def with_inputs(value: Any) -> Any:
    return parse({"checkpoint": {"path": "/run"}, "validation": {"test_input_samples": value}})


@pytest.mark.parametrize("value", ["", "/some/where.jsonl", LIST], ids=["none", "path", "list"])
def test_it_is_the_same_after_a_message(value: Any) -> None:
    configuration = with_inputs(value)
    again = configuration_of(configuration_message(configuration))
    assert again.validation.test_input_samples == configuration.validation.test_input_samples
    assert again.model_dump_json() == configuration.model_dump_json()


def test_a_path_is_a_source_and_a_list_a_parameter() -> None:
    named, listed = with_inputs("/some/where.jsonl"), with_inputs(LIST)
    assert source_settings(named)["test_inputs"] == "/some/where.jsonl"
    assert "test_inputs" not in source_settings(listed)
    of_path = plan(named, ("adapter", "base", "test_inputs"))[-1]
    of_list = plan(listed, ("adapter", "base"))[-1]
    assert (of_path.inputs["test_inputs"], "test_inputs" in of_path.params) == ("source:test_inputs", False)
    assert ("test_inputs" in of_list.inputs, of_list.params["test_inputs"]) == (False, LIST)


def test_without_validation_there_is_no_source() -> None:
    validation = {"enabled": False, "test_input_samples": "/some/where.jsonl"}
    assert "test_inputs" not in source_settings(parse({"checkpoint": {"path": "/run"}, "validation": validation}))


def test_a_path_starts_at_the_file_and_a_list_can_be_written_there(tmp_path: Path) -> None:
    file = tmp_path / "export.yaml"
    file.write_text("export: {checkpoint: {path: run}, validation: {test_input_samples: questions.jsonl}}")
    found = load(file, environment={}).configuration.validation.test_input_samples
    assert found == str(tmp_path / "questions.jsonl")
    file.write_text(f"export: {{checkpoint: {{path: run}}, validation: {{test_input_samples: {json.dumps(LIST)}}}}}")
    assert load(file, environment={}).configuration.validation.test_input_samples == tuple(LIST)
    of_variable = load(file, environment={"EXPORT_TEST_INPUT_SAMPLES": "a.txt"}, folder=tmp_path).configuration
    assert of_variable.validation.test_input_samples == str(tmp_path / "a.txt")


@pytest.mark.parametrize(
    "value",
    [1, True, ["one"], {"prompt": "a"}, [{"prompt": "a"}] * (MOST_TEST_INPUTS + 1), [{"prompt": "a" * LARGEST_TEST_INPUTS}]],
    ids=["number", "truth", "texts", "object", "many", "large"],
)  # fmt: skip
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        with_inputs(value)
    assert "validation.test_input_samples" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert "[] has" not in str(caught.value)


def test_the_file_is_found_in_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("{}")
    assert find_test_inputs(file) == find_test_inputs(tmp_path) == file
    (tmp_path / "more.json").write_text("[]")
    for wrong in (tmp_path, tmp_path / "missing", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigurationError, match=r"validation\.test_input_samples"):
            find_test_inputs(wrong)
    (tmp_path / "a.bin").write_text("{}")
    with pytest.raises(ConfigurationError):
        find_test_inputs(tmp_path / "a.bin")
    os.truncate(file, LARGEST + 1)
    with pytest.raises(ConfigurationError, match="bytes"):
        find_test_inputs(file)

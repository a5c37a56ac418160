"""Failures, data and configurations survive the conversion to messages and back."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from google.protobuf import struct_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.rpc import code_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from slipway.configuration import ExportConfiguration, FormatsConfiguration, parse
from slipway.errors import MOST_TEXT, ConfigurationError, Failure, ModelMergeError
from slipway.formats import LevelSettings
from slipway.reasons import REASONS
from slipway.rpc.call_ends import call_status
from slipway.rpc.messages import configuration_message, configuration_of
from slipway.rpc.values import (
    RETRY_AFTER,
    dict_of,
    failure_of_bytes,
    failure_of_status,
    status_of,
    struct_of,
    timestamp,
)
from slipway_protos.v1 import configuration_pb2

texts = st.text(max_size=30)
failures = st.builds(
    Failure,
    reason=st.sampled_from(sorted(REASONS)),
    message=texts,
    remedy=texts,
    error_type=st.just("ModelMergeError"),
    about=st.dictionaries(st.sampled_from(["tensor", "file", "engine"]), texts),
    retryable=st.booleans(),
)
data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(failure=failures)
def test_failures_come_back(failure: Failure) -> None:
    assert failure_of_status(status_of(failure)) == failure


def test_a_failures_error_is_of_its_class_again() -> None:
    error = ModelMergeError("m", reason="ADAPTER_TENSOR_UNUSED", remedy="r", about={"tensor": "w"})
    again = failure_of_status(status_of(error.failure())).error()
    assert (type(again), again.reason, again.about, str(again)) == (ModelMergeError, error.reason, error.about, "m; r")


def test_codes_follow_from_the_reason() -> None:
    for reason, row in REASONS.items():
        status = status_of(Failure(reason=reason, message=""))
        assert code_pb2.Code.Name(status.code) == row.category.status_code


def test_a_status_from_elsewhere_is_internal() -> None:
    failure = failure_of_status(status_pb2.Status(code=code_pb2.ABORTED, message="from a proxy"))
    assert (failure.reason, failure.message) == ("INTERNAL", "from a proxy")


def test_what_is_too_long_for_a_call_is_cut_but_keeps_its_reason() -> None:
    failure = Failure(
        reason="DISK_FULL", message="x" * 100_000, remedy="y" * 100_000, about={"a": "b", "c": "z" * 100_000}
    )
    _, _, status = call_status(failure)
    again = failure_of_status(status_pb2.Status.FromString(status))
    assert len(status) < 8192
    assert (again.reason, again.about) == ("DISK_FULL", {"a": "b"})


@given(data=st.dictionaries(texts, data, max_size=4))
def test_data_comes_back_with_its_integers(data: dict[str, Any]) -> None:
    again = dict_of(struct_of(data))
    assert again == data
    assert str(again.get("n")) == str(data.get("n"))


def test_whole_numbers_are_integers_and_tuples_lists() -> None:
    again = dict_of(struct_of({"a": 1, "b": 1.5, "c": True, "d": (1, 2), "e": {"f": None}}))
    assert again == {"a": 1, "b": 1.5, "c": True, "d": [1, 2], "e": {"f": None}}
    assert type(again["a"]) is int
    assert type(again["c"]) is bool


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimization": {"quantization": ["int8", "int4"]}, "formats": {"onnx": {"quantization": []}}},
        {"formats": {"tensorrt": {"enabled": True, "targets": ["sm89"], "past": {"min": 0, "opt": 0, "max": 64}}}},
        {
            "resources": {"max_memory_bytes": 1 << 45, "threads": 3, "stage_timeouts": {"merge": 60, "validate": 5}},
            "recovery": {"profile": "conservative", "max_attempts": 2},
        },
        {
            "validation": {
                "limits": {"int4": {"mean_kl": 0.03, "perplexity_ratio": 2}, "float32": {"top1_agreement": 0.0}}
            }
        },
        {"checkpoint": {"path": "x", "auto_detect_latest": False}, "log": {"level": "debug"}},
    ],
)
def test_configurations_come_back(settings: dict[str, Any]) -> None:
    configuration = parse(settings)
    assert configuration_of(configuration_message(configuration)) == configuration


def test_what_a_message_does_not_say_takes_its_default() -> None:
    message = configuration_pb2.ExportConfiguration()
    message.formats["onnx"].enabled = False
    assert configuration_of(message) == parse({"formats": {"onnx": {"enabled": False}}})


def test_a_formats_own_settings_are_checked_by_its_own_model_and_unknown_names_refused_with_a_suggestion() -> None:
    message = configuration_pb2.ExportConfiguration()
    message.formats["onnx"].settings["opset_version"] = 99
    message.formats["tensorrt"].settings["target"] = "sm89"
    message.formats["onx"].enabled = True
    message.formats["adapter"].unquantized = True
    with pytest.raises(ConfigurationError) as caught:
        configuration_of(message)
    problems = {problem["key"]: problem for problem in json.loads(caught.value.about["problems"])}
    assert "use 14 to 24" in problems["formats.onnx.opset_version"]["remedy"]
    assert problems["formats.tensorrt.target"]["remedy"] == "did you mean 'targets'?"
    assert problems["formats.onx"]["remedy"] == "did you mean 'onnx'?"
    assert problems["formats.adapter.unquantized"]["message"] == "is not a setting"


def test_a_setting_that_is_typed_is_taken_before_the_same_one_among_a_formats_own() -> None:
    message = configuration_pb2.ExportConfiguration()
    message.formats["onnx"].enabled = False
    message.formats["onnx"].settings["enabled"] = True
    assert configuration_of(message).formats.onnx.enabled is False


def test_a_message_that_cannot_be_honoured_says_all_of_why() -> None:
    message = configuration_pb2.ExportConfiguration()
    message.optimization.group_size = 33
    message.validation.test_samples = 0
    with pytest.raises(ConfigurationError) as caught:
        configuration_of(message)
    assert "group_size" in str(caught.value)
    assert "test_samples" in str(caught.value)


def test_model_and_message_have_the_same_fields() -> None:
    walk(ExportConfiguration, configuration_pb2.ExportConfiguration.DESCRIPTOR)


def walk(model: type[BaseModel], descriptor: Any) -> None:
    if issubclass(model, FormatsConfiguration):
        value = descriptor.fields_by_name["value"].message_type
        typed = {
            name
            for name, field in value.fields_by_name.items()
            if field.message_type is not struct_pb2.Struct.DESCRIPTOR
        }
        assert typed == set(LevelSettings.model_fields)
        assert all(field.has_presence for field in value.fields)
        return
    assert set(model.model_fields) == set(descriptor.fields_by_name), descriptor.full_name
    for name, info in model.model_fields.items():
        field = descriptor.fields_by_name[name]
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            walk(info.annotation, field.message_type)
        elif rows := [
            kind for kind in get_args(info.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]:
            walk(rows[0], field.message_type.fields_by_name["value"].message_type)
        elif field.type != FieldDescriptor.TYPE_MESSAGE:
            assert field.is_repeated or field.has_presence, f"{field.full_name}: not set and zero would be the same"


@given(seconds=st.floats(0, 4e9))
def test_times_come_back_to_the_microsecond(seconds: float) -> None:
    moment = timestamp(seconds)
    assert moment is not None
    assert abs(moment.ToNanoseconds() / 1e9 - seconds) < 1e-5


def test_what_json_has_no_word_for_is_null_and_half_a_character_a_question_mark() -> None:
    odd = {
        "nan": float("nan"),
        "far": [float("inf"), -float("inf")],
        "many": 10**400,
        "half \ud83d": "\ud83d",
        "true": True,
    }
    assert dict_of(struct_of(odd)) == {"nan": None, "far": [None, None], "many": None, "half ?": "?", "true": True}
    peers = struct_of({})
    peers["far"] = float("inf")  # as another program may send it
    assert dict_of(peers) == {"far": None}


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e400", "soon", ""])
def test_a_failure_that_says_no_time_to_try_again_travels_all_the_same(seconds: str) -> None:
    failure = Failure(reason="QUEUE_FULL", message="m", about={RETRY_AFTER: seconds})
    assert len(status_of(failure).details) == 1
    assert len(status_of(Failure(reason="QUEUE_FULL", message="m", about={RETRY_AFTER: "5"})).details) == 2


def test_a_failure_of_somebody_else_has_bounds() -> None:
    said = Failure(
        reason="\x1b[31m",
        message="m" * 10**6,
        remedy="r" * 10**6,
        about={f"{n}" * 999: "v" * 10**5 for n in range(100)},
    )
    failure = failure_of_status(status_of(said))
    assert failure.reason == "INTERNAL"
    assert len(failure.message) == len(failure.remedy) == MOST_TEXT
    assert len(failure.about) == 64
    assert max(map(len, failure.about.values())) == MOST_TEXT


def test_bytes_that_are_no_status_are_a_failure() -> None:
    assert failure_of_bytes(b"\xff\xff").reason == "INTERNAL"
    assert failure_of_bytes(status_of(Failure(reason="QUEUE_FULL", message="m")).SerializeToString()).message == "m"

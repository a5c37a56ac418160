"""The plan has only the requested tasks, in an order that can run, with every reference resolved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.artifacts import action_key
from slipway.artifacts.digests import digest_bytes
from slipway.configuration import parse
from slipway.errors import ServiceError
from slipway.formats.tasks import PlannedTask
from slipway.planning.deferral import defer_weights
from slipway.planning.plan import plan
from slipway.registry import load_stage
from slipway.rpc.values import dict_of, struct_of

SOURCES = ("adapter", "base")

formats = st.fixed_dictionaries(
    {
        "pytorch": st.fixed_dictionaries({"enabled": st.booleans(), "save_tokenizer": st.booleans()}),
        "onnx": st.fixed_dictionaries({"enabled": st.booleans(), "opset_version": st.sampled_from([0, 14, 20])}),
        "tensorrt": st.fixed_dictionaries({"enabled": st.booleans()}),
    }
).filter(lambda chosen: any(format_["enabled"] for format_ in chosen.values()))
configurations = st.fixed_dictionaries(
    {
        "formats": formats,
        "optimization": st.fixed_dictionaries(
            {"quantization": st.lists(st.sampled_from(["none", "fp16", "int8", "int4"]), max_size=4)}
        ),
        "validation": st.fixed_dictionaries({"enabled": st.booleans()}),
    }
)


def planned(data: dict[str, Any], sources: tuple[str, ...] = SOURCES) -> dict[str, PlannedTask]:
    return {task.id: task for task in plan(parse(data), sources)}


@settings(max_examples=60, deadline=None)
@given(data=configurations)
def test_every_plan_can_run(data: dict[str, Any]) -> None:
    tasks = plan(parse(data), SOURCES)
    outputs: set[str] = set()
    for task in tasks:
        stage = load_stage(task.stage)
        task.call.check(stage)
        for reference in task.inputs.values():
            kind, _, where = reference.partition(":")
            assert (kind == "source" and where in SOURCES) or (kind == "task" and where in outputs)
        outputs |= {f"{task.id}/{name}" for name in stage.outputs}
    ids = [task.id for task in tasks]
    assert len(set(ids)) == len(ids)


@settings(max_examples=60, deadline=None)
@given(data=configurations)
def test_what_is_delivered_is_what_was_asked_for(data: dict[str, Any]) -> None:
    configuration = parse(data)
    expected = set()
    for name in ("pytorch", "onnx"):
        if data["formats"][name]["enabled"]:
            levels = [level for level in data["optimization"]["quantization"] if level != "none"]
            expected |= {name, *(f"{name}-{level}" for level in levels)}
    if data["formats"]["tensorrt"]["enabled"]:
        expected.add("tensorrt")
    if data["validation"]["enabled"]:
        expected.add("validation")
    assert {task.format for task in plan(configuration, SOURCES)} - {""} == expected


def test_validation_takes_the_reference_and_every_output() -> None:
    tasks = planned({"optimization": {"quantization": "int8"}, "formats": {"tensorrt": {"enabled": True}}})
    inputs = tasks["validate"].inputs
    assert set(inputs) == {"base", "adapter", "reference", "pytorch", "pytorch-int8", "onnx", "onnx-int8", "tensorrt"}
    assert inputs["onnx-int8"] == "task:quantize-onnx-int8/model"
    assert tasks["validate"].partial
    assert inputs["reference"] == "task:reference/reference"
    assert set(tasks["reference"].inputs) == {"base", "adapter"}
    assert not tasks["reference"].format, "it is an intermediate result: validation cannot do without it"


def test_exports_of_one_adapter_share_the_reference() -> None:
    one = actions({"formats": {"onnx": {"enabled": False}}, "validation": {"benchmark_performance": False}})
    other = actions({"optimization": {"quantization": "int8"}, "validation": {"limits": {"int8": {"mean_kl": 0.1}}}})
    assert one["reference"] == other["reference"]
    assert one["validate"] != other["validate"]
    for changed in ({"effort": "quick"}, {"test_samples": 3}):
        assert actions({"validation": changed})["reference"] != one["reference"]


def test_nothing_is_referred_to_without_a_comparison() -> None:
    tasks = planned({"validation": {"compare_outputs": False}})
    assert "reference" not in tasks
    assert "reference" not in tasks["validate"].inputs


def actions(data: dict[str, Any]) -> dict[str, str]:
    """Return the action key of every task; the digest of an input is made from its reference."""
    keys = {}
    for task in plan(parse(data), SOURCES):
        inputs = {name: digest_bytes(reference.encode()) for name, reference in task.inputs.items()}
        stage = load_stage(task.stage)
        keys[task.id] = action_key(stage, inputs, task.call.check(stage))
    return keys


def test_exports_with_and_without_validation_share_their_results() -> None:
    data = {"optimization": {"quantization": ["int8", "int4"]}, "formats": {"tensorrt": {"enabled": True}}}
    with_validation = actions({**data, "validation": {"enabled": True}})
    of_validation = {
        "validate",
        "reference",
        "calibration_data",
        "calibrate-int4",
    }  # the last two are in reserve
    with_validation = {name: action for name, action in with_validation.items() if name not in of_validation}
    assert "merge" in with_validation
    assert actions({**data, "validation": {"enabled": False}}) == with_validation


def test_held_out_text_reaches_validation() -> None:
    tasks = planned({}, ("adapter", "base", "heldout"))
    assert tasks["validate"].inputs["heldout"] == tasks["reference"].inputs["heldout"] == "source:heldout"


def test_tensorrt_gets_a_graph_of_its_own_that_is_not_delivered() -> None:
    tasks = planned({"formats": {"tensorrt": {"enabled": True}, "onnx": {"enabled": False}}})
    graph = tasks["onnx_export-tensorrt"]
    assert (graph.format, graph.params["runtime"]) == ("", "tensorrt")
    assert tasks["tensorrt_build"].inputs == {"onnx": "task:onnx_export-tensorrt/onnx"}
    assert "onnx_export" not in tasks


def test_a_format_may_carry_its_own_levels() -> None:
    data = {"optimization": {"quantization": "int8"}, "formats": {"onnx": {"quantization": ["fp16", "int4"]}}}
    assert [task for task in planned(data) if task.startswith("quantize")] == [
        "quantize-pytorch-int8",
        "quantize-onnx-fp16",
        "quantize-onnx-int4",
    ]


def test_the_merge_is_not_delivered_when_pytorch_is_not_wanted_but_keeps_its_tokenizer() -> None:
    merge = planned({"formats": {"pytorch": {"enabled": False, "save_tokenizer": False}}})["merge"]
    assert (merge.format, merge.params["save_tokenizer"]) == ("", True)


def test_settings_become_parameters() -> None:
    data = {"optimization": {"quantization": "int4", "group_size": 64, "compress_weights": False}}
    params = planned(data)["quantize-pytorch-int4"].params
    assert (params["group_size"], params["packed"], params["level"]) == (64, False, "int4")


ONLY_LEVELS = {"unquantized": False, "quantization": ["int4", "int8"]}


def deferred(data: dict[str, Any], sources: tuple[str, ...] = SOURCES) -> set[str]:
    return {name for name, task in planned(data, sources).items() if task.params.get("weights") == "deferred"}


def test_weights_that_nobody_asked_for_are_left_out_and_made_where_they_are_read() -> None:
    formats = {"onnx": ONLY_LEVELS, "pytorch": {"enabled": True, **ONLY_LEVELS}}
    # A calibration in reserve would read them.
    tasks = planned({"formats": formats, "validation": {"on_failure": "keep"}})
    origins = {"base": "source:base", "adapter": "source:adapter"}
    assert tasks["merge"].params["weights"] == tasks["onnx_export"].params["weights"] == "deferred"
    assert tasks["onnx_export"].inputs == {"pytorch": "task:merge/pytorch", **origins}
    for level in ("int4", "int8"):
        model = {"model": "task:onnx_export/onnx", "pytorch": "task:merge/pytorch"}
        assert tasks[f"quantize-onnx-{level}"].inputs == {**model, **origins}
        assert tasks[f"quantize-pytorch-{level}"].inputs == {"model": "task:merge/pytorch", **origins}
    for task in tasks.values():
        task.call.check(load_stage(task.stage))


@pytest.mark.parametrize(
    ("formats", "more", "expected"),
    [
        ({"onnx": ONLY_LEVELS, "pytorch": {"enabled": True}}, {}, {"onnx_export"}),
        ({"onnx": {"quantization": "int4"}, "pytorch": {"enabled": True, **ONLY_LEVELS}}, {}, set()),
        ({"onnx": {**ONLY_LEVELS, "packaging": ["genai"]}, "pytorch": {"enabled": False}}, {}, set()),
        ({"onnx": {**ONLY_LEVELS, "activations": {"layers": [0]}}, "pytorch": {"enabled": False}}, {}, set()),
        ({"onnx": ONLY_LEVELS, "pytorch": {"enabled": False}, "tensorrt": {"enabled": True}}, {}, {"onnx_export"}),
        ({"onnx": ONLY_LEVELS, "pytorch": {"enabled": False}}, {"validation": {"enabled": False}}, set()),
        ({"onnx": ONLY_LEVELS, "pytorch": {"enabled": False}}, {"validation": {"compare_outputs": False}}, set()),
        (
            {"onnx": {"enabled": False}, "pytorch": {"enabled": True, **ONLY_LEVELS}},
            {"validation": {"enabled": False}},
            {"merge"},
        ),
    ],
)
def test_weights_are_written_where_anything_needs_them(
    formats: dict[str, Any], more: dict[str, Any], expected: set[str]
) -> None:
    assert deferred({"formats": formats, **more}) == expected


def test_the_graph_of_a_plain_model_leaves_its_weights_out_too() -> None:
    data = {"formats": {"onnx": ONLY_LEVELS, "pytorch": {"enabled": False}}}
    assert deferred(data, ("base",)) == {"onnx_export"}


@pytest.mark.parametrize(("name", "left_out"), [("base", False), ("adapter", False), ("more", True)])
def test_weights_are_written_for_a_reader_whose_other_input_has_the_name_of_one_they_are_made_of(
    name: str, *, left_out: bool
) -> None:
    tasks = planned({"formats": {"onnx": {"enabled": False}, "pytorch": {"enabled": True, **ONLY_LEVELS}}})
    merge, other = tasks["merge"], f"source:{name}-of-another"
    reader = replace(tasks["quantize-pytorch-int4"], inputs={"model": merge.reference, name: other})
    merge = replace(merge, params={key: value for key, value in merge.params.items() if key != "weights"})
    merge, reader = defer_weights([merge, reader], compared=True)
    assert (merge.params.get("weights") == "deferred") is left_out
    assert reader.inputs == {"model": merge.reference, name: other, **(merge.inputs if left_out else {})}


def test_limits_reach_the_stage_and_travel_there() -> None:
    limits = {"int4": {"mean_kl": 0.5, "perplexity_ratio": 2.0}}
    params = planned({"validation": {"limits": limits}})["validate"].params
    stage = load_stage("validate")
    taken = stage.params.model_validate(dict_of(struct_of(params)))  # as a task carries them
    assert params["limits"] == limits
    assert taken.model_dump()["limits"]["int4"]["mean_kl"] == 0.5
    assert taken.model_dump()["limits"]["int4"]["top1_agreement"] is None


def test_a_missing_source_is_named() -> None:
    with pytest.raises(ServiceError, match="sources lacks adapter, base") as caught:
        plan(parse({}), [])
    assert caught.value.reason == "REQUEST_INVALID"


def test_several_adapters_become_one_that_is_merged_and_compared_with() -> None:
    data = {"combination": {"adapters": ["b", "c"], "weights": [0.5, 0.25, -1.0], "type": "ties"}}
    tasks = planned(data, ("adapter", "adapter-02", "adapter-03", "base"))
    combine = tasks["combine"]
    assert combine.inputs == {name: f"source:{name}" for name in ("adapter", "adapter-02", "adapter-03")}
    combine.call.check(load_stage("combine"))
    assert combine.params["weights"] == [0.5, 0.25, -1.0]
    assert tasks["merge"].inputs["adapter"] == tasks["validate"].inputs["adapter"] == "task:combine/adapter"


def test_every_adapter_to_combine_must_be_there() -> None:
    with pytest.raises(ServiceError, match="adapter-03"):
        planned({"combination": {"adapters": ["b", "c"]}}, ("adapter", "adapter-02", "base"))


def by_id(data, **formats):
    return {task.id: task for task in plan(parse(data), SOURCES, source_formats=formats)}


def test_a_plain_base_is_taken_as_it_is():
    tasks = by_id({"base_model": {"load_in_4bit": True}})
    assert "prepare" not in tasks
    assert tasks["merge"].inputs["base"] == tasks["validate"].inputs["base"] == "source:base"


@pytest.mark.parametrize("stored_as", ["gptq", "pickle", "fp8"])
def test_another_base_is_prepared_for_the_merge_and_for_the_reference(stored_as):
    tasks = by_id({}, base=stored_as)
    assert next(iter(tasks)) == "prepare"
    assert tasks["prepare"].inputs == {"base": "source:base"}
    assert tasks["prepare"].params == {"merge_onto": "original"}
    assert tasks["merge"].inputs["base"] == tasks["validate"].inputs["base"] == "task:prepare/base"


def test_the_nf4_round_trip_is_a_preparation_too():
    tasks = by_id({"base_model": {"load_in_4bit": True, "merge_onto": "nf4"}})
    assert tasks["prepare"].params == {"merge_onto": "nf4"}
    assert tasks["merge"].inputs["base"] == "task:prepare/base"


def test_an_export_whose_format_was_uninstalled_can_still_be_shown() -> None:
    from slipway_coordinator.api.messages import export_message
    from support.coordinators.harness import tiny_export

    record = tiny_export("shown")
    formats = {**record.configuration["formats"], "gone": {"enabled": True, "quantization": ["q4"], "knob": 1}}
    message = export_message(record.with_(configuration={**record.configuration, "formats": formats}))
    gone = message.configuration.formats["gone"]
    assert (gone.enabled, list(gone.quantization.levels), dict_of(gone.settings)) == (True, ["q4"], {"knob": 1})
    assert message.configuration.formats["onnx"].enabled


@settings(max_examples=40, deadline=None)
@given(data=configurations, stored=st.sampled_from(["", "gptq", "pickle"]))
def test_a_plain_model_takes_the_place_of_the_merged_one(data: dict[str, Any], stored: str) -> None:
    tasks = plan(parse(data), ("base",), source_formats={"base": stored} if stored else {})
    for task in tasks:
        task.call.check(load_stage(task.stage))
    assert not {"merge", "combine"} & {task.stage for task in tasks}
    prepared = tasks[0]
    assert (prepared.stage, prepared.inputs) == ("prepare", {"base": "source:base"})
    assert prepared.format == ("pytorch" if data["formats"]["pytorch"]["enabled"] else "")
    if data["validation"]["enabled"]:
        (validated,) = [task for task in tasks if task.stage == "validate"]
        assert "adapter" not in validated.inputs
        assert validated.inputs["base"] == ("task:prepare/base" if stored else "source:base")


@pytest.mark.parametrize(
    ("data", "sources", "missing"),
    [
        ({"checkpoint": {"path": "run"}}, ("base",), "adapter"),
        ({"combination": {"adapters": ["other"]}}, ("base", "adapter-02"), "adapter"),
        ({}, (), "adapter, base"),
        ({}, ("adapter",), "base"),
    ],
)
def test_a_source_that_is_missing_is_named(data: dict[str, Any], sources: tuple[str, ...], missing: str) -> None:
    with pytest.raises(ServiceError, match=f"sources lacks {missing}"):
        plan(parse(data), sources)

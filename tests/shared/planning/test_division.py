"""Tasks that a plan divides: those of large models, as far as their stages allow it."""

from __future__ import annotations

from typing import Any

import pytest

from slipway.artifacts import action_key
from slipway.configuration import parse
from slipway.errors import ConfigurationError
from slipway.formats.tasks import PlannedTask
from slipway.planning.division import divide, weight_bytes
from slipway.planning.plan import plan
from slipway.registry import load_stage
from slipway.sizes import ModelSize

GB = 10**9
SOURCES = ("adapter", "base")


def planned(size: int = 30 * GB, **data: Any) -> dict[str, PlannedTask]:
    settings = {"formats": {"pytorch": {"quantization": "bf16"}, "onnx": {"enabled": False}}, **data}
    return {task.id: task for task in plan(parse(settings), SOURCES, weight_bytes=size)}


def test_nothing_is_divided_unless_it_is_asked_for() -> None:
    assert planned() == planned(0)
    assert planned(execution={"split_bytes": 30 * GB}) == planned(0), "as large as a part may be"
    assert planned(0, execution={"split_bytes": GB}) == planned(0), "of unknown size"


def test_a_large_model_is_merged_and_cast_in_parts() -> None:
    tasks = planned(execution={"split_bytes": 10 * GB})
    assert [name for name in tasks if name.startswith("merge")] == [
        "merge.part-1",
        "merge.part-2",
        "merge.part-3",
        "merge",
    ]
    first, join = tasks["merge.part-1"], tasks["merge"]
    assert (first.output, first.format, dict(first.inputs)) == (
        "part",
        "",
        {"base": "source:base", "adapter": "source:adapter"},
    )
    assert (first.params["part"], first.params["parts"]) == (1, 3)
    assert (join.output, join.format) == ("pytorch", "pytorch")
    assert dict(join.inputs) == {f"part-00{number}": f"task:merge.part-{number}/part" for number in (1, 2, 3)}
    cast = tasks["quantize-pytorch-bf16"]
    assert cast.params["parts"] == 3
    assert tasks["quantize-pytorch-bf16.part-2"].inputs["model"] == "task:merge/pytorch"


def test_parts_have_whole_files() -> None:
    assert planned(execution={"split_bytes": GB})["merge"].params["parts"] == 6, "files of 5 GB"
    smaller = planned(execution={"split_bytes": GB, "shard_bytes": GB})
    assert smaller["merge"].params["parts"] == 30
    assert smaller["quantize-pytorch-bf16.part-1"].params["max_shard_bytes"] == GB


def test_every_task_of_a_divided_one_has_a_key_of_its_own() -> None:
    tasks = [task for name, task in planned(execution={"split_bytes": 10 * GB}).items() if name.startswith("merge")]
    calls = [task.known() for task in (*tasks, *planned(0).values()) if task.stage == "merge"]
    same = dict.fromkeys(("base", "adapter"), "sha256:" + "1" * 64)
    keys = {action_key(known[0], same, known[1]) for known in calls if known is not None}
    assert len(keys) == len(calls) == 5
    whole = load_stage("merge")
    assert all(known is not None and known[0].name == whole.name for known in calls)


def test_a_stage_that_is_not_divided_refuses_the_parameters() -> None:
    call = PlannedTask("x", "onnx_export", {"parts": 2, "part": 1}, {"pytorch": "source:base"}).call
    stage = load_stage("onnx_export")
    with pytest.raises(ConfigurationError, match="parts"):
        call.check(call.step(stage))
    assert divide([PlannedTask("x", "onnx_export", {}, {})], split_bytes=1, weight_bytes=9)[0].id == "x"


@pytest.mark.parametrize("wrong", [{"parts": 1}, {"parts": 2, "part": 3}, {"parts": 2, "part": -1}, {"parts": "2"}])
def test_impossible_parts_are_refused(wrong: dict[str, Any]) -> None:
    call = PlannedTask("x", "merge", wrong, {"base": "source:base", "adapter": "source:adapter"}).call
    with pytest.raises(ConfigurationError):
        call.check(call.step(load_stage("merge")))


def test_small_files_are_refused_in_the_settings() -> None:
    with pytest.raises(ConfigurationError, match=r"execution\.shard_bytes"):
        parse({"execution": {"shard_bytes": 1000}})


def test_pickles_count_only_without_safetensors() -> None:
    assert weight_bytes({"a.safetensors": 5, "b.safetensors": 6, "pytorch_model.bin": 7, "config.json": 8}) == 11
    assert weight_bytes({"pytorch_model.bin": 7, "config.json": 8}) == 7
    assert weight_bytes({"config.json": 8}) == 0


def test_the_work_of_the_parts_is_that_of_the_whole() -> None:
    """Progress adds up by it: each part has its share of the expected time, the join almost none."""
    size = ModelSize(weights=15 * GB, weight_bytes=30 * GB, largest=GB, largest_bytes=2 * GB, companion_bytes=10**7)

    def work(task: PlannedTask) -> float:
        stage, params = task.known() or pytest.fail("it is installed")
        return stage.forecast.work_bytes(params, stage.forecast.output_bytes(params, size), size)

    tasks = planned(execution={"split_bytes": 10 * GB})
    parts = [work(task) for name, task in tasks.items() if name.startswith("merge.part")]
    assert sum(parts) == pytest.approx(work(planned(0)["merge"]))
    assert max(parts) == min(parts)
    assert work(tasks["merge"]) == 0

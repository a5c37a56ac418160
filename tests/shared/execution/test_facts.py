"""Facts of a result: lists with every tensor of a large model are cut, in the stage and in the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipway.execution.runner import TaskResult
from slipway.rpc.values import dict_of
from slipway.stage import MOST_FACTS_BYTES, Context
from slipway.worker.leased import output_message
from slipway_merge.tensors.deltas import Change
from slipway_merge.writing.writer import relative_changes

NAMES = [f"model.layers.{n % 48}.mlp.experts.{n // 48}.gate_proj" for n in range(20_000)]
FACTS: dict[str, Any] = {
    "tensors_merged": len(NAMES),
    "tensors_replaced": NAMES,
    "modules": relative_changes([Change(name, f"{name}.weight", rank=64, scaling=2.0) for name in NAMES]),
    "parts": {"names": NAMES, "few": [1, 2]},
}


def test_a_result_of_very_many_tensors_is_cut_and_not_refused() -> None:
    output = output_message(TaskResult(facts=FACTS))  # as an older version recorded it
    assert output.facts.ByteSize() < MOST_FACTS_BYTES
    facts = dict_of(output.facts)
    assert facts["tensors_merged"] == 20_000
    assert facts["modules"] == FACTS["modules"][:300]
    assert facts["tensors_replaced"] == NAMES[:300]
    assert facts["modules_left_out"] == facts["tensors_replaced_left_out"] == 19_700
    assert facts["parts"] == {"names": NAMES[:300], "names_left_out": 19_700, "few": [1, 2]}


def test_a_stage_records_no_more_than_travels(tmp_path: Path) -> None:
    ctx = Context(workdir=tmp_path)
    ctx.record(**FACTS)
    assert ctx.facts == dict_of(output_message(TaskResult(facts=FACTS)).facts)
    assert output_message(TaskResult(facts=ctx.facts)) == output_message(TaskResult(facts=FACTS))

"""Plans that exports of a batch share, and those that they must not."""

from __future__ import annotations

from typing import Any

import pytest

from slipway.configuration import parse
from slipway.rpc.messages import asked_configuration_message
from slipway_coordinator.api import plans as module
from slipway_coordinator.api.export_service import new_record
from slipway_coordinator.api.plans import Plans
from slipway_protos.v1 import export_pb2
from support.coordinators.harness import DIGEST

OTHER = "sha256:" + "2" * 64


def request(settings: dict[str, Any] | None = None, **fields: Any) -> export_pb2.CreateExportRequest:
    asked = {"parent": "projects/p", "sources": {"base": DIGEST, "adapter": DIGEST}} | fields
    return export_pb2.CreateExportRequest(configuration=asked_configuration_message(parse(settings or {})), **asked)


def test_a_kept_plan_gives_the_record_that_a_new_one_gives() -> None:
    plans = Plans()
    for asked in (
        request(),
        request(sources={"base": OTHER, "adapter": DIGEST}),
        request({"formats": {"onnx": {"enabled": False}}}),
    ):
        for each in (asked, asked):
            kept, new = (new_record(each, plans=known).with_(create_time=0.0, name="") for known in (plans, None))
            assert kept == new


def test_exports_with_one_configuration_share_their_plan() -> None:
    plans = Plans()
    first, second = (
        new_record(request(sources={"base": base, "adapter": DIGEST}), plans=plans) for base in (DIGEST, OTHER)
    )
    assert all(one is other for one, other in zip(first.tasks, second.tasks, strict=True))
    assert first.request_hash != second.request_hash


def test_what_changes_the_plan_makes_another() -> None:
    plans, message = Plans(), request().configuration
    first = plans.of(message, ["base", "adapter"], formats={})
    assert plans.of(message, ["adapter", "base"], formats={}) is first
    with_text = plans.of(message, ["base", "adapter", "heldout"], formats={})
    assert any("heldout" in task.inputs for task in with_text.tasks)
    assert not any("heldout" in task.inputs for task in first.tasks)
    converted = plans.of(message, ["base", "adapter"], formats={"base": "pickle"})
    assert [task.stage for task in converted.tasks] == ["prepare", *(task.stage for task in first.tasks)]
    assert plans.of(message, ["base", "adapter"], formats={}, weight_bytes=1 << 40) is not first


def test_few_plans_are_kept_and_the_last_used_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    plans = Plans()
    messages = [request({"validation": {"test_samples": number}}).configuration for number in (1, 2, 3)]
    first, second = (plans.of(each, ["base", "adapter"], formats={}) for each in messages[:2])
    assert plans.of(messages[0], ["base", "adapter"], formats={}) is first
    plans.of(messages[2], ["base", "adapter"], formats={})
    assert plans.of(messages[0], ["base", "adapter"], formats={}) is first
    assert plans.of(messages[1], ["base", "adapter"], formats={}) is not second

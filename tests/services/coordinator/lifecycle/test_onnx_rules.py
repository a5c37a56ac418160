"""The rules of the ONNX export: which engine, opset, attention and shapes follow each failure."""

from __future__ import annotations

from typing import Any

import pytest

from slipway_coordinator.lifecycle.records import AttemptRecord, TaskState
from slipway_coordinator.lifecycle.recovery import recover, with_guidance
from slipway_coordinator.lifecycle.rules import Profile, default_rules
from slipway_onnx_export.params import ENGINE_OPSETS
from support.coordinators.attempts import chain, failure


def test_an_old_opset_is_written_by_the_legacy_tracer_or_raised_with_a_warning() -> None:
    start = {"engine": "mobius", "opset": 14}
    found = chain("onnx_export", ["OPSET_UNSUPPORTED", "UNORDERED_MAP"], Profile.BALANCED, start)
    assert [(a.params["engine"], a.params["opset"], bool(a.warning)) for a in found[:2]] == [
        ("legacy", 14, False),
        ("dynamo", 18, True),
    ]


def test_a_graph_of_an_old_opset_that_is_not_right_is_traced_at_that_opset() -> None:
    found = chain("onnx_export", ["EXPORT_PARITY_FAILED"], Profile.BALANCED, {"engine": "mobius", "opset": 15})
    assert [(a.params["engine"], a.params["opset"]) for a in found[:2]] == [("legacy", 15), ("dynamo", 18)]


def test_an_opset_between_is_written_by_the_capturing_engine() -> None:
    found = chain("onnx_export", ["OPSET_UNSUPPORTED"], Profile.BALANCED, {"engine": "mobius", "opset": 20})
    assert found[0].params == {"engine": "dynamo", "opset": 20}


def test_an_opset_nobody_writes_is_replaced_with_a_warning() -> None:
    found = chain("onnx_export", ["OPSET_UNSUPPORTED"], Profile.BALANCED, {"engine": "mobius", "opset": 26})
    assert found[0].params["opset"] is None
    assert found[0].warning


def test_every_engine_gets_its_turn_and_none_twice() -> None:
    found = chain("onnx_export", ["EXPORT_PARITY_FAILED"], Profile.BALANCED, {"engine": "mobius", "opset": None})
    assert [attempt.params["engine"] for attempt in found[:2]] == ["dynamo", "legacy"]
    tried = [tuple(sorted((k, str(v)) for k, v in attempt.params.items())) for attempt in found]
    assert len(set(tried)) == len(tried)


def ran(params: dict[str, Any], *, built: bool) -> str:
    """The engine of an attempt: for ``auto`` as the stage chooses it, for a decoder that mobius builds or another model."""
    if params["engine"] != "auto":
        return str(params["engine"])
    if built:
        return "mobius"
    return "legacy" if params["opset"] in ENGINE_OPSETS["legacy"] else "dynamo"


ENGINE_FAILURES = ("EXPORT_ENGINE_FAILED", "EXPORT_ENGINE_UNSUPPORTED", "EXPORT_PARITY_FAILED")


@pytest.mark.parametrize("reason", ENGINE_FAILURES)
@pytest.mark.parametrize(
    ("built", "opset", "first"),
    [
        (True, None, ("mobius", None)),
        (True, 20, ("mobius", 20)),
        (True, 15, ("mobius", 15)),
        (False, None, ("dynamo", None)),
        (False, 20, ("dynamo", 20)),
        (False, 15, ("legacy", 15)),
    ],
)
def test_after_the_chosen_engine_each_other_one_runs(
    reason: str, built: bool, opset: int | None, first: tuple[str, int | None]
) -> None:
    found = chosen(reason, built=built, opset=opset)
    assert found[0] == first
    assert {"dynamo", "legacy"} <= {engine for engine, _ in found}


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("opset", [8, 26, 13])
def test_an_opset_that_the_chosen_engine_does_not_write(built: bool, opset: int) -> None:
    found = chosen("OPSET_UNSUPPORTED", built=built, opset=opset, until_written=True)
    assert found[0] == ("mobius" if built else "dynamo", opset)
    if opset == 26:
        assert found[-1] == ("mobius" if built else "dynamo", None)
    else:
        assert found[-1] == ("mobius" if built else "legacy", 14)
    assert len(found) <= 3


def test_what_only_the_legacy_tracer_says_leads_to_capture() -> None:
    legacy, capture = ("legacy", 14), ("dynamo", 18)
    assert chosen("UNORDERED_MAP", built=False, opset=14)[:2] == [legacy, capture]
    assert chosen("TRACER_WARNING", built=False, opset=14)[:3] == [
        legacy,
        legacy,
        capture,
    ]  # first it may be proven harmless


def chosen(reason: str, *, built: bool, opset: int | None, until_written: bool = False) -> list[tuple[str, int | None]]:
    """Engine and opset of every attempt of an export that begins with ``auto``, if each fails for this reason."""
    params: dict[str, Any] = {"engine": "auto", "opset": opset}
    history: list[AttemptRecord] = []
    found: list[tuple[str, int | None]] = []
    rule = ""
    while True:
        engine = ran(params, built=built)
        found.append((engine, params["opset"]))
        if until_written and (params["opset"] is None or params["opset"] in ENGINE_OPSETS[engine]):
            return found
        history.append(AttemptRecord(number=len(found), state=TaskState.FAILED, params=params, rule=rule))
        following = recover(
            failure(reason, engine=engine),
            "onnx_export",
            params=params,
            history=history,
            profile=Profile.BALANCED,
            facts={},
            max_attempts=20,
        )
        if following is None:
            return found
        params, rule = following.params, following.rule


def onnx_chain(
    reasons: list[str], params: dict[str, Any] | None = None, limit: int = 5, **about: str
) -> list[dict[str, Any]]:
    """The changed parameters of each attempt that follows."""
    start = {"engine": "auto", "opset": None, **(params or {})}
    found = chain("onnx_export", reasons, Profile.BALANCED, start, limit, about={"family": "decoder", **about})
    before, changes = start, []
    for attempt in found:
        changes.append({name: value for name, value in attempt.params.items() if before.get(name) != value})
        before = attempt.params
    return changes


_DECODER = {"family": "decoder"}
_OF = {engine: {"engine": engine, **_DECODER} for engine in ("mobius", "dynamo", "legacy")}
_BOTH = (("EXPORT_ENGINE_FAILED", "dynamo"), ("EXPORT_ENGINE_FAILED", "legacy"))
_REACHED: dict[str, tuple[str, dict[str, Any], dict[str, str], tuple[tuple[str, str], ...], dict[str, Any]]] = {
    "onnx-usual-cache": (
        "OPERATOR_UNSUPPORTED", {"past_present_share_buffer": True}, _OF["mobius"], (), {"past_present_share_buffer": False},
    ),
    "onnx-all-logits": ("OPERATOR_UNSUPPORTED", {"logits_to_keep": 1}, _OF["mobius"], (), {"logits_to_keep": 0}),
    "onnx-opset-oldest": ("OPSET_UNSUPPORTED", {"opset": 11}, _OF["mobius"], (), {"opset": 14}),
    "onnx-opset-by-capture": (
        "OPSET_UNSUPPORTED", {"engine": "legacy", "opset": 21}, _OF["legacy"], (), {"engine": "dynamo"},
    ),
    "onnx-opset-engine-best": ("OPSET_UNSUPPORTED", {"engine": "dynamo", "opset": 26}, _OF["dynamo"], (), {"engine": "auto", "opset": None}),
    "onnx-attention-eager": (
        "EXPORT_ENGINE_UNSUPPORTED", {"engine": "dynamo"}, {**_OF["dynamo"], "attention": "sdpa"}, (), {"attention": "eager"},
    ),
    "onnx-attention-branches": (
        "DYNAMIC_SHAPE", {"engine": "dynamo"},
        {**_OF["dynamo"], "attention": "sdpa", "kind": "data", "file": "sdpa_attention.py"}, (), {"attention": "eager"},
    ),
    "onnx-warning-proven": ("TRACER_WARNING", {"engine": "legacy", "opset": 17}, _OF["legacy"], (), {"tracer_warnings": "prove"}),
    "onnx-operator-newer-opset": (
        "OPERATOR_UNSUPPORTED", {"engine": "legacy", "opset": 14}, {**_OF["legacy"], "since": "16"}, (), {"opset": 17},
    ),
    "onnx-without-optimization": (
        "EXPORT_ENGINE_FAILED", {"engine": "dynamo"}, {**_OF["dynamo"], "phase": "optimization"}, (), {"optimization": "none"},
    ),
    "onnx-old-opset-legacy-tracer": ("EXPORT_PARITY_FAILED", {"opset": 15}, _OF["mobius"], (), {"engine": "legacy"}),
    "onnx-old-opset-raised": (
        "UNORDERED_MAP", {"engine": "legacy", "opset": 14}, _OF["legacy"], (), {"engine": "dynamo", "opset": 18},
    ),
    "onnx-capture-instead-of-construction": ("ONNX_INVALID", {}, _OF["mobius"], (), {"engine": "dynamo"}),
    "onnx-capture-plainly": (
        "EXPORT_PARITY_FAILED", {"engine": "dynamo"}, _OF["dynamo"], (), {"attention": "eager", "optimization": "none"},
    ),
    "onnx-capture-instead-of-trace": (
        "UNORDERED_MAP", {"engine": "legacy"}, _OF["legacy"], (), {"engine": "dynamo", "opset": 18},
    ),
    "onnx-legacy-instead-of-capture": (
        "EXPORT_ENGINE_FAILED", {"engine": "dynamo"}, _OF["dynamo"], (), {"engine": "legacy", "opset": 17, "optimization": "basic"},
    ),
    "onnx-static-shapes": (
        "DYNAMIC_SHAPE", {"engine": "legacy"}, {**_OF["legacy"], "kind": "axis"}, (), {"engine": "dynamo", "shapes": "static"},
    ),
    "onnx-static-shapes-no-cache": (
        "SHAPES_UNSUPPORTED", {"shapes": "static"}, _OF["dynamo"], (), {"shapes": "static", "cache": False},
    ),
    "onnx-no-cache": ("EXPORT_ENGINE_FAILED", {"engine": "legacy"}, _OF["legacy"], _BOTH, {"engine": "auto", "cache": False}),
    "onnx-layer-by-layer": (
        "EXPORT_ENGINE_FAILED", {"cache": False}, _OF["dynamo"], _BOTH, {"engine": "dynamo", "layered": True, "cache": True},
    ),
    "onnx-data-outside": ("ONNX_TOO_LARGE", {"external_data": False}, _OF["mobius"], (), {"external_data": True}),
    "onnx-memory-construction": (
        "OUT_OF_MEMORY", {"engine": "dynamo"}, _OF["dynamo"], (("OUT_OF_MEMORY", "dynamo"),) * 2, {"engine": "auto"},
    ),
}  # fmt: skip
"""What leads to each rule: a failure, parameters, what the failure is about, earlier failures, and what the rule changes."""


@pytest.mark.parametrize("name", [rule.name for rule in default_rules().rules if rule.name.startswith("onnx-")])
def test_each_rule_is_reached(name: str) -> None:
    reason, more, about, earlier, changes = _REACHED[name]
    params = {"engine": "auto", "opset": None, **more}
    failures = [failure(other, engine=engine) for other, engine in earlier] + [failure(reason, **about)]
    before = ("", "memory-alone", "memory-alone-less")  # rules for every stage come first
    history = [
        AttemptRecord(
            number=number,
            state=TaskState.FAILED,
            params={**params, "sequence": number},
            failure=each,
            rule=before[number],
        )
        for number, each in enumerate(failures)
    ]
    history[-1] = history[-1].model_copy(update={"params": params})
    found = recover(
        failures[-1], "onnx_export", params=params, history=history, profile=Profile.BALANCED, facts={}, max_attempts=20
    )
    assert found is not None
    assert found.rule == name
    assert found.params == {**params, **found.params, **changes}


def test_an_opset_is_replaced_by_the_nearest_that_an_engine_writes() -> None:
    assert onnx_chain(["OPSET_UNSUPPORTED"], {"opset": 11}, limit=2) == [{"opset": 14}]
    assert onnx_chain(["OPSET_UNSUPPORTED"], {"opset": 26}, limit=2) == [{"opset": None}]
    assert onnx_chain(["OPSET_UNSUPPORTED"], {"engine": "legacy", "opset": 21}, limit=2) == [{"engine": "dynamo"}]


def test_an_optimization_that_fails_is_left_out_before_another_engine_is_tried() -> None:
    changes = onnx_chain(
        ["EXPORT_ENGINE_FAILED", "EXPORT_ENGINE_FAILED"],
        {"optimization": "all"},
        limit=3,
        engine="dynamo",
        phase="optimization",
    )
    assert changes[0] == {"optimization": "none"}
    assert "engine" in changes[1]


def test_a_tracer_warning_is_proven_harmless_or_cured() -> None:
    first, second = onnx_chain(["TRACER_WARNING", "EXPORT_PARITY_FAILED"], {"engine": "legacy", "opset": 14}, limit=3)
    assert first == {"tracer_warnings": "prove"}
    assert second == {"engine": "dynamo", "opset": 18, "tracer_warnings": "refuse"}
    without = onnx_chain(["TRACER_WARNING"], {"engine": "legacy", "opset": 14, "parity": "never"}, limit=2)
    assert without == [{"engine": "dynamo", "opset": 18, "tracer_warnings": "refuse"}]


def test_an_axis_that_is_fixed_leads_to_eager_then_legacy_then_static_shapes() -> None:
    reasons = ["DYNAMIC_SHAPE", "DYNAMIC_SHAPE", "EXPORT_PARITY_FAILED"]
    eager, legacy, static = onnx_chain(
        reasons, {"engine": "dynamo", "opset": 20}, limit=4, kind="axis", attention="sdpa"
    )
    assert eager == {"attention": "eager"}
    assert legacy["engine"] == "legacy"
    assert (static["shapes"], static["engine"], static["opset"]) == ("static", "dynamo", 20)


def test_code_that_branches_on_values_is_not_tried_with_fixed_shapes() -> None:
    reasons = ["DYNAMIC_SHAPE", "TRACER_WARNING", "EXPORT_PARITY_FAILED"]
    found = onnx_chain(reasons, {"engine": "dynamo"}, limit=9, kind="data", attention="sdpa")
    assert [change.get("engine", "") for change in found] == ["legacy", ""]
    assert found[1] == {"tracer_warnings": "prove"}


def test_an_operator_that_no_engine_writes_is_asked_of_each_once() -> None:
    assert [change["engine"] for change in onnx_chain(["OPERATOR_UNSUPPORTED"], {"engine": "dynamo"})] == ["legacy"]
    old = onnx_chain(["OPERATOR_UNSUPPORTED"], {"engine": "legacy", "opset": 14})
    assert [(change["engine"], change["opset"]) for change in old] == [("dynamo", 18)]
    newer = onnx_chain(["OPERATOR_UNSUPPORTED"], {"engine": "legacy", "opset": 14}, since="16")
    assert newer[0] == {"opset": 17}


def test_a_decoder_with_an_encoder_gets_fixed_shapes_only_without_its_cache() -> None:
    found = onnx_chain(
        ["DYNAMIC_SHAPE", "EXPORT_PARITY_FAILED"], {"engine": "dynamo"}, kind="axis", attention="eager",
        family="encoder-decoder",
    )  # fmt: skip
    assert found[1]["shapes"] == "static"
    assert found[1]["cache"] is False


def test_steps_name_the_operator_or_line_at_fault_and_leave_out_what_is_unknown() -> None:
    about = {"operator": "aten::special_bessel_j0", "file": "modeling_x.py", "line": "7", "code": "return bessel(x)"}
    steps = with_guidance(failure("OPERATOR_UNSUPPORTED", **about), "onnx_export", attempts=2).about["guidance"]
    assert "aten::special_bessel_j0" in steps
    assert "modeling_x.py, line 7: return bessel(x)" in steps
    less = with_guidance(failure("OPERATOR_UNSUPPORTED", operator="x"), "onnx_export", attempts=2).about["guidance"]
    assert "line" not in less
    assert "{" not in less


def test_a_warning_about_what_a_later_attempt_takes_back_is_withdrawn() -> None:
    reasons = ["DYNAMIC_SHAPE", "EXPORT_PARITY_FAILED"]
    start = {"engine": "dynamo", "opset": 20}
    about = {"kind": "axis", "attention": "eager", "family": "decoder"}
    legacy, static = chain("onnx_export", reasons, Profile.BALANCED, start, 3, about=about)
    assert "made by the legacy tracer" in legacy.warning
    assert (legacy.withdrawn, static.withdrawn) == ((), (legacy.warning,))
    assert "fixed shapes" in static.warning


@pytest.mark.parametrize("reason", ["OPERATOR_UNSUPPORTED", "EXPORT_ENGINE_UNSUPPORTED", "EXPORT_PARITY_FAILED"])
def test_a_form_for_serving_is_given_up_with_a_warning_before_anything_else(reason: str) -> None:
    start = {"engine": "auto", "opset": None, "past_present_share_buffer": True}
    (first, *_) = chain("onnx_export", [reason], Profile.BALANCED, start)
    assert first.params == {**start, "past_present_share_buffer": False}
    assert "cannot share a buffer" in first.warning


def test_logits_of_all_tokens_are_returned_where_none_can_be_left_out() -> None:
    start = {"engine": "auto", "opset": None, "logits_to_keep": 1}
    (first, *_) = chain("onnx_export", ["OPERATOR_UNSUPPORTED"], Profile.BALANCED, start)
    assert first.params == {**start, "logits_to_keep": 0}
    assert first.warning


def test_no_warning_speaks_of_an_older_opset_that_was_not_asked_for() -> None:
    reasons = ["EXPORT_PARITY_FAILED"] * 8
    found = chain("onnx_export", reasons, Profile.BALANCED, {"engine": "auto", "opset": None}, 20)
    fallback = next(index for index, attempt in enumerate(found) if attempt.params["engine"] == "legacy")
    assert found[fallback].params["opset"] == 17
    assert len(found) > fallback + 1
    assert not [attempt.warning for attempt in found if "older one" in attempt.warning]
    asked = chain("onnx_export", reasons, Profile.BALANCED, {"engine": "auto", "opset": 16}, 20)
    assert [attempt.warning for attempt in asked if "older one" in attempt.warning]

"""Recovery: every rule is reachable, profiles differ, attempts end, tables are checked."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import ConfigurationError, Failure
from slipway.reasons import REASONS
from slipway.registry import known_stage, load_stage
from slipway_coordinator.model.records import AttemptRecord, Resources
from slipway_coordinator.model.recovery import NextAttempt, choose_profile, recover, with_guidance
from slipway_coordinator.model.rules import Profile, Rule, default_rules, load_rules
from slipway_coordinator.model.states import TaskState
from slipway_onnx_export.opsets import ENGINE_OPSETS

STAGES = ("merge", "quantize", "onnx_export", "tensorrt_build", "validate")
START: dict[str, dict[str, Any]] = {
    "onnx_export": {"engine": "auto", "opset": None},
    "quantize": {"format": "onnx", "level": "int4", "group_size": 128},
}

ABOUT: tuple[dict[str, str], ...] = (
    {},
    {"attention": "sdpa", "kind": "axis", "family": "decoder"},
    {"attention": "eager", "family": "encoder-decoder"},
    {"attention": "sdpa", "kind": "data", "file": "sdpa_attention.py"},
    {"since": "17"},
)
"""What failed attempts of the ONNX export know."""


def failure(reason: str, **about: str) -> Failure:
    return Failure(reason=reason, message="it failed", about=about)


def chain(
    stage: str,
    reasons: list[str],
    profile: Profile,
    params: dict[str, Any],
    limit: int = 10,
    *,
    alone: bool = False,
    about: dict[str, str] | None = None,
) -> list[NextAttempt]:
    """The attempts that follow when attempts fail with these reasons, the last one for ever.

    Failures of the ONNX export name their engine, unless ``about`` is empty.
    """
    history = [AttemptRecord(number=1, state=TaskState.FAILED, params=params)]
    following: list[NextAttempt] = []
    for reason in itertools.chain(reasons, itertools.repeat(reasons[-1])):
        said = {"group_size": str(history[-1].params["group_size"])} if stage == "quantize" else dict(about or {})
        if stage == "onnx_export" and about:
            engine = history[-1].params["engine"]
            said["engine"] = "mobius" if engine == "auto" else engine
        history[-1] = history[-1].model_copy(update={"failure": failure(reason, **said)})
        found = recover(
            failure(reason, **said),
            stage,
            params=history[-1].params,
            history=history,
            profile=profile,
            facts={},
            max_attempts=limit,
            alone=alone,
        )
        if found is None:
            return following
        following.append(found)
        history.append(
            AttemptRecord(
                number=len(history) + 1,
                state=TaskState.FAILED,
                params=found.params,
                resources=found.resources,
                rule=found.rule,
            )
        )
    raise AssertionError


def names(attempts: list[NextAttempt]) -> list[str]:
    return [attempt.rule for attempt in attempts]


@pytest.mark.parametrize("rule", default_rules().rules, ids=lambda rule: rule.name)
def test_every_rule_is_reachable(rule: Rule) -> None:
    stages = rule.stages or STAGES
    opsets = (None, 11, 14, 20, 26)
    for stage, profile, reason in itertools.product(stages, rule.profiles, rule.reasons):
        starts = (
            [{**START.get(stage, {}), "opset": opset} for opset in opsets]
            if stage == "onnx_export"
            else [START.get(stage, {})]
        )
        engines = ("auto", "mobius", "dynamo", "legacy") if stage == "onnx_export" else ("",)
        for start, engine in itertools.product(starts, engines):
            params = {**start, "engine": engine} if engine else start
            for about in ABOUT if stage == "onnx_export" else ({},):
                if rule.name in names(chain(stage, [reason], profile, params, about=about)):
                    return
    pytest.fail(f"nothing leads to {rule.name}")


@pytest.mark.parametrize(
    "rule", [rule for rule in default_rules().rules if rule.set and rule.stages], ids=lambda r: r.name
)
def test_parameters_a_rule_sets_are_valid_for_its_stages(rule: Rule) -> None:
    for name in rule.stages:
        fields = load_stage(name).params.model_fields
        assert {*rule.set, *rule.restore} <= set(fields)


@pytest.mark.parametrize("profile", Profile)
@pytest.mark.parametrize("stage", STAGES)
def test_attempts_end_by_themselves(stage: str, profile: Profile) -> None:
    for reason in sorted(REASONS):
        assert len(chain(stage, [reason], profile, START.get(stage, {}), limit=100)) < 8, reason


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


def test_profiles_differ() -> None:
    chains = {profile: names(chain("merge", ["OUT_OF_MEMORY"], profile, {})) for profile in Profile}
    assert chains[Profile.CONSERVATIVE][0] == "memory-alone-less"
    assert chains[Profile.BALANCED][:2] == ["memory-alone", "memory-alone-less"]
    crashes = {profile: len(chain("merge", ["STAGE_CRASHED"], profile, {})) for profile in Profile}
    assert crashes[Profile.AGGRESSIVE] > crashes[Profile.CONSERVATIVE]


def test_less_memory_means_alone_one_thread_and_a_lower_limit() -> None:
    found = chain("merge", ["OUT_OF_MEMORY"], Profile.CONSERVATIVE, {})[0]
    assert found.resources == Resources(memory_factor=0.5, threads=1, exclusive=True)


def test_the_limit_of_attempts_holds() -> None:
    assert len(chain("merge", ["STAGE_KILLED"], Profile.BALANCED, {}, limit=2)) == 1


def test_bad_input_is_not_tried_again() -> None:
    for reason in ("ADAPTER_BASE_MISMATCH", "NON_FINITE_WEIGHTS", "SAFETENSORS_CORRUPT", "UNSAFE_PICKLE"):
        assert chain("merge", [reason], Profile.AGGRESSIVE, {}) == []


@pytest.mark.parametrize("reason", ["DISK_FULL", "FILE_ERROR", "STORE_DENIED", "UNSUPPORTED"])
@pytest.mark.parametrize("profile", Profile)
def test_what_a_worker_lacks_another_may_have(reason: str, profile: Profile) -> None:
    found = chain("merge", [reason], profile, {})
    assert found[0].elsewhere
    assert found[0].wait_seconds > 0, "a worker that is alone is not asked again at once"
    assert not any(attempt.elsewhere for attempt in chain("merge", [reason], profile, {}, alone=True))


def test_one_process_does_not_try_again_what_it_lacks() -> None:
    for reason in ("FILE_ERROR", "STORE_DENIED", "UNSUPPORTED"):
        assert chain("merge", [reason], Profile.AGGRESSIVE, {}, alone=True) == []


def test_a_store_that_does_not_answer_is_waited_for_longer_and_longer() -> None:
    waits = [attempt.wait_seconds for attempt in chain("merge", ["STORE_UNAVAILABLE"], Profile.BALANCED, {}, limit=5)]
    assert waits == [15, 30, 60, 120]


# Reasons of calls and services, with which no stage ends; NO_WORKER is one the coordinator gives up with.
NOT_OF_TASKS = {
    "CALL_TIMEOUT", "COORDINATOR_LOCKED", "COORDINATOR_UNAVAILABLE", "NO_WORKER", "QUEUE_FULL", "REQUESTS_FULL", "TRANSFER_SLOW", "UPLOADS_FULL",
    "WORKER_BUSY",
}  # fmt: skip


@pytest.mark.parametrize("profile", Profile)
def test_whatever_may_pass_by_itself_is_tried_again(profile: Profile) -> None:
    for reason in sorted(name for name, reason in REASONS.items() if reason.retryable and name not in NOT_OF_TASKS):
        assert chain("merge", [reason], profile, {}), reason


def test_auto_chooses_by_size_and_history() -> None:
    short = AttemptRecord(number=1, state=TaskState.FAILED, params={}, failure=failure("OUT_OF_MEMORY"))
    assert choose_profile("auto", model_bytes=70 << 30, history=[]) is Profile.CONSERVATIVE
    assert choose_profile("auto", model_bytes=8 << 30, history=[]) is Profile.BALANCED
    assert choose_profile("auto", model_bytes=1 << 30, history=[]) is Profile.AGGRESSIVE
    assert choose_profile("auto", model_bytes=1 << 30, history=[short]) is Profile.BALANCED
    assert choose_profile("auto", model_bytes=1 << 30, history=[short, short]) is Profile.CONSERVATIVE
    assert choose_profile("aggressive", model_bytes=70 << 30, history=[short]) is Profile.AGGRESSIVE


def test_a_final_failure_says_step_by_step_what_to_do() -> None:
    final = with_guidance(failure("OUT_OF_MEMORY"), "merge", attempts=3)
    assert "(1)" in final.remedy
    assert "after 3 attempts" in final.remedy
    assert len(final.about["guidance"].splitlines()) >= 3
    assert with_guidance(failure("STAGE_ERROR"), "merge", attempts=1).about["guidance"]
    late = with_guidance(failure("STAGE_TIMEOUT"), "validate", attempts=1)
    assert "resources.stage_timeouts.validate" in late.remedy


def test_steps_for_any_failure_do_not_follow_a_remedy_of_its_own() -> None:
    own = replace(failure("STAGE_ERROR"), remedy="do this")
    assert with_guidance(own, "merge", attempts=3) == own
    known = replace(failure("OUT_OF_MEMORY"), remedy="do this")
    assert with_guidance(known, "merge", attempts=1).remedy.startswith("do this; by hand: (1)")


def test_steps_name_only_commands_that_need_no_coordinator() -> None:
    """An export inside one command has none; what is for one alone says so."""
    steps = [step for steps in default_rules().guidance.values() for step in steps]
    assert [
        step
        for step in steps
        if re.search(r"slipway (watch|get|list|retry|worker)", step) and "coordinator" not in step
    ] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rules: [{name: a, reasons: [NO_SUCH], say: x}]\nguidance: {default: [y]}", "NO_SUCH"),
        ("rules: [{name: a, reasons: [DISK_FULL], say: x, sets: {}}]\nguidance: {default: [y]}", "sets"),
        (
            "rules: [{name: a, reasons: [DISK_FULL], say: x, when: {engine: {in: [a]}}}]\nguidance: {default: [y]}",
            "engine",
        ),
        ("rules: []\nguidance: {}", "default"),
        ("rules: [", "rules"),
    ],
)
def test_a_table_with_a_mistake_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=says) as caught:
        load_rules(tmp_path / "rules.yaml")
    assert caught.value.reason == "CONFIGURATION_INVALID"


def test_an_operators_table_replaces_the_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(
        "rules: [{name: mine, reasons: [UNSUPPORTED], when: {about.tool: {in: [x]}}, set: {a: 1}, say: s}]\n"
        "guidance: {default: [call us]}"
    )
    table = load_rules(tmp_path / "rules.yaml")
    history = [AttemptRecord(number=1, state=TaskState.FAILED, params={})]
    arguments: dict[str, Any] = {
        "params": {},
        "history": history,
        "profile": Profile.BALANCED,
        "facts": {},
        "max_attempts": 5,
    }
    found = recover(failure("UNSUPPORTED", tool="x"), "merge", table=table, **arguments)
    assert found is not None
    assert (found.rule, found.params) == ("mine", {"a": 1})
    assert recover(failure("UNSUPPORTED", tool="y"), "merge", table=table, **arguments) is None
    assert with_guidance(failure("DISK_FULL"), "merge", attempts=1, table=table).about["guidance"] == "call us"


def test_a_table_says_where_the_rules_of_stages_stand(tmp_path: Path) -> None:
    rule = "{{name: {}, reasons: [OUT_OF_MEMORY], say: s, repeat: true}}"
    between = f"[{rule.format('first')}, rules of the stage, {rule.format('last')}]"
    without = f"[{rule.format('first')}, {rule.format('last')}]"
    found = {}
    for rules in (between, without):
        (tmp_path / "rules.yaml").write_text(f"rules: {rules}\nguidance: {{default: [call us]}}")
        found[rules] = load_rules(tmp_path / "rules.yaml")
    assert [rule.name for rule in found[without].rules] == ["first", "last"]
    assert set(found[without].guidance) == {("", "default")}
    inner = found[between].rules[1:-1]
    assert {rule.stages for rule in inner} == {("onnx_export",), ("quantize",), ("validate",)}
    assert [found[between].rules[0].name, found[between].rules[-1].name] == ["first", "last"]
    assert ("tensorrt_build", "TENSORRT_PARSE_FAILED") in found[between].guidance


def test_guidance_of_a_stage_is_not_given_for_another() -> None:
    """A stage of another distribution may raise the same reason; the settings of ours do not help it."""
    ours = with_guidance(failure("EXPORT_ENGINE_FAILED"), "onnx_export", attempts=1)
    assert "formats.onnx.opset_version" in ours.about["guidance"]
    other = with_guidance(failure("EXPORT_ENGINE_FAILED"), "other", attempts=1)
    assert "onnx" not in other.about["guidance"]
    assert "slipway stage other" in other.about["guidance"]


@pytest.fixture
def stage_with_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The rules of a stage that another distribution brings."""
    information = tmp_path / "bringing-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: bringing\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[slipway.stages]\nbringing = bringing:STAGE\n")
    (tmp_path / "bringing.py").write_text(
        "from pathlib import Path\nfrom slipway import Stage, StageParams\n"
        "STAGE = Stage(name='bringing', version=1, inputs=(), outputs=('out',), params=StageParams, run=None,\n"
        "              recovery=Path(__file__).with_name('own.yaml'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bringing", raising=False)
    known_stage.cache_clear()
    yield tmp_path / "own.yaml"
    sys.modules.pop("bringing", None)
    known_stage.cache_clear()


def test_a_stage_of_another_distribution_brings_its_rules(stage_with_rules: Path) -> None:
    stage_with_rules.write_text("rules: [{name: mine, reasons: [STAGE_ERROR], set: {a: 1}, say: s}]")
    table = load_rules()
    history = [AttemptRecord(number=1, state=TaskState.FAILED, params={})]
    for stage, leads_to in (("bringing", "mine"), ("merge", None)):
        found = recover(
            failure("STAGE_ERROR"), stage, params={}, history=history, profile=Profile.BALANCED, facts={}, max_attempts=5,
            table=table,
        )  # fmt: skip
        assert (found and found.rule) == leads_to


def test_a_stage_whose_module_is_broken_does_not_keep_a_coordinator_from_starting(stage_with_rules: Path) -> None:
    stage_with_rules.with_name("bringing.py").write_text("this is no Python")
    assert load_rules() == default_rules()
    with pytest.raises(ConfigurationError, match="there is no stage 'bringing': ") as caught:
        load_stage("bringing")
    assert caught.value.reason == "STAGE_UNKNOWN"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rules: [{name: a, reasons: [DISK_FULL], say: x, stages: [merge]}]", "stages"),
        ("rules: [rules of the stage]", "rules.0"),
        ("guidance: {default: [y]}", "default"),
        ("rules: [{name: memory-alone, reasons: [DISK_FULL], say: x}]", "memory-alone"),
        ("rules: [", "own.yaml"),
    ],
)
def test_rules_of_a_stage_with_a_mistake_are_refused(stage_with_rules: Path, text: str, says: str) -> None:
    stage_with_rules.write_text(text)
    with pytest.raises(ConfigurationError, match=says) as caught:
        load_rules()
    assert caught.value.reason == "CONFIGURATION_INVALID"
    assert "errors.pydantic.dev" not in str(caught.value)


def test_a_model_of_another_kind_is_not_tried_again() -> None:
    for profile in Profile:
        assert chain("onnx_export", ["FAMILY_UNSUPPORTED"], profile, START["onnx_export"]) == []


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


def test_an_opset_is_replaced_by_the_nearest_that_an_engine_writes() -> None:
    assert onnx_chain(["OPSET_UNSUPPORTED"], {"opset": 11}, limit=2) == [{"opset": 14}]
    assert onnx_chain(["OPSET_UNSUPPORTED"], {"opset": 26}, limit=2) == [{"opset": None}]
    assert onnx_chain(["OPSET_UNSUPPORTED"], {"engine": "legacy", "opset": 21}, limit=2) == [{"engine": "dynamo"}]


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

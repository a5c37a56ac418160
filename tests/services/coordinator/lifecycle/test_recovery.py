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

from slipway.errors import ConfigurationError
from slipway.formats.registry import formats
from slipway.levels import LEVELS
from slipway.reasons import REASONS
from slipway.registry import known_stage, load_stage
from slipway_coordinator.lifecycle.records import AttemptRecord, Resources, TaskState
from slipway_coordinator.lifecycle.recovery import choose_profile, recover, with_guidance
from slipway_coordinator.lifecycle.rules import Profile, Rule, default_rules, load_rules
from support.coordinators.attempts import START, chain, failure, names

STAGES = ("merge", "quantize", "onnx_export", "tensorrt_build", "reference", "validate")

ABOUT: tuple[dict[str, str], ...] = (
    {},
    {"attention": "sdpa", "kind": "axis", "family": "decoder"},
    {"attention": "eager", "family": "encoder-decoder"},
    {"attention": "sdpa", "kind": "data", "file": "sdpa_attention.py"},
    {"since": "17"},
    {"phase": "optimization"},
)
"""What failed attempts of the ONNX export know."""


def test_every_rule_is_reachable() -> None:
    assert [rule.name for rule in default_rules().rules if not is_reachable(rule)] == []


def is_reachable(rule: Rule) -> bool:
    """Return whether anything leads to a rule."""
    stages = rule.stages or STAGES
    forms = (
        *({"opset": opset} for opset in (None, 11, 14, 20, 26)),
        {"opset": None, "past_present_share_buffer": True, "logits_to_keep": 1},
    )
    for stage, profile, reason in itertools.product(stages, rule.profiles, rule.reasons):
        starts = [START.get(stage, {})]
        if stage == "onnx_export":
            starts = [{**starts[0], **form} for form in forms]
        if stage == "merge":
            starts.append({**starts[0], "parts": 2})  # it joins parts
        if stage == "quantize":
            small = {"level": "int4", "group_size": 32}
            starts += [{**starts[0], "format": each, **small} for each in ("pytorch", "onnx")]
            starts.append({**starts[0], "format": "pytorch", "level": "int3", "group_size": 32})
            starts += [{**starts[0], "format": "pytorch", "level": "int8", "group_size": size} for size in (32, 128)]
            starts.append({**starts[0], "format": "onnx", **small, "external_data": False})
        engines = ("auto", "mobius", "dynamo", "legacy") if stage == "onnx_export" else ("",)
        for start, engine in itertools.product(starts, engines):
            params = {**start, "engine": engine} if engine else start
            for about in ABOUT if stage == "onnx_export" else ({},):
                if rule.name in names(chain(stage, [reason], profile, params, about=about, reserve=rule.reserve)):
                    return True
    return False


def test_parameters_a_rule_sets_are_valid_for_its_stages() -> None:
    for rule in default_rules().rules:
        for name in rule.stages if rule.set else ():
            fields = load_stage(name).params.model_fields
            assert {*rule.set, *rule.restore} <= set(fields), (rule.name, name)


@pytest.mark.parametrize("stage", STAGES)
def test_attempts_end_by_themselves(stage: str) -> None:
    for profile, reason in itertools.product(Profile, sorted(REASONS)):
        found = chain(stage, [reason], profile, START.get(stage, {}), limit=100)
        assert len(found) < 8, (profile, reason)


def test_profiles_differ() -> None:
    chains = {profile: names(chain("merge", ["OUT_OF_MEMORY"], profile, {})) for profile in Profile}
    assert chains[Profile.CONSERVATIVE][0] == "memory-alone-less"
    assert chains[Profile.BALANCED][:2] == ["memory-alone", "memory-alone-less"]
    crashes = {profile: len(chain("merge", ["STAGE_CRASHED"], profile, {})) for profile in Profile}
    assert crashes[Profile.AGGRESSIVE] > crashes[Profile.CONSERVATIVE]


def test_less_memory_means_alone_one_thread_and_a_lower_limit() -> None:
    found = chain("merge", ["OUT_OF_MEMORY"], Profile.CONSERVATIVE, {})[0]
    assert found.resources == Resources(memory_factor=0.5, threads=1, exclusive=True)


def test_a_full_gpu_is_tried_alone_then_with_less_then_elsewhere_or_later() -> None:
    for alone, last in ((False, ["gpu-memory-elsewhere"] * 2), (True, ["gpu-memory-later"] * 2)):
        found = chain("tensorrt_build", ["GPU_OUT_OF_MEMORY"], Profile.BALANCED, {}, alone=alone)
        assert names(found)[:4] == ["gpu-memory-alone", "tensorrt-less-workspace", *last]
        assert [attempt.params.get("workspace_bytes") for attempt in found[:3]] == [None, 1 << 30, 1 << 30]
        assert [attempt.wait_seconds for attempt in found[2:4]] == [30, 60]


def test_the_limit_of_attempts_holds() -> None:
    assert len(chain("merge", ["STAGE_KILLED"], Profile.BALANCED, {}, limit=2)) == 1


def test_bad_input_is_not_tried_again() -> None:
    for reason in ("ADAPTER_BASE_MISMATCH", "NON_FINITE_WEIGHTS", "SAFETENSORS_CORRUPT", "UNSAFE_PICKLE"):
        assert chain("merge", [reason], Profile.AGGRESSIVE, {}) == []


@pytest.mark.parametrize("reason", ["DISK_FULL", "FILE_ERROR", "STORE_DENIED", "UNSUPPORTED"])
def test_what_a_worker_lacks_another_may_have(reason: str) -> None:
    for profile in Profile:
        found = chain("merge", [reason], profile, {})
        assert found[0].elsewhere, profile
        assert found[0].wait_seconds > 0, "a worker that is alone is not asked again at once"
        assert not any(attempt.elsewhere for attempt in chain("merge", [reason], profile, {}, alone=True)), profile


def test_one_process_does_not_try_again_what_it_lacks() -> None:
    for reason in ("FILE_ERROR", "STORE_DENIED", "UNSUPPORTED"):
        assert chain("merge", [reason], Profile.AGGRESSIVE, {}, alone=True) == []


def test_a_store_that_does_not_answer_is_waited_for_longer_and_longer() -> None:
    waits = [attempt.wait_seconds for attempt in chain("merge", ["STORE_UNAVAILABLE"], Profile.BALANCED, {}, limit=5)]
    assert waits == [15, 30, 60, 120]


# Reasons of calls, services and waiting tasks, with which no stage ends; NO_WORKER is one the coordinator gives up with.
NOT_OF_TASKS = {
    "CALL_TIMEOUT", "COORDINATOR_LOCKED", "COORDINATOR_UNAVAILABLE", "ENGINE_UNAVAILABLE", "ISSUER_UNAVAILABLE", "NO_WORKER", "QUEUE_FULL", "REGISTRY_UNAVAILABLE", "REQUESTS_FULL", "RIGHTS_CHANGED", "TRANSFER_SLOW", "UPLOADS_FULL",
    "UPLOAD_LOST", "WORKERS_DRAINING", "WORKER_BUSY", "WORKER_OUTDATED", "WORKER_UNFIT",
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
    formats = ("executorch", "gguf", "onnx_export", "quantize", "tensorrt_build", "torch_export", "torchscript")
    assert {rule.stages for rule in inner} == {(name,) for name in (*formats, "reference", "validate")}
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


@pytest.mark.parametrize(("format_name", "widest"), [("pytorch", "bf16"), ("onnx", "fp16")])
def test_every_rejected_level_leads_to_16_bits(format_name: str, widest: str) -> None:
    """By levels that are each closer to the model than the one before."""
    tightest_first = list(LEVELS)
    narrow = [level for level in formats()[format_name].levels if level not in {"fp16", "bf16"}]
    assert len(narrow) >= 4
    for profile, level in itertools.product(Profile, narrow):
        start = {"format": format_name, "level": level, "group_size": 128}
        found = chain("quantize", ["VALIDATION_FAILED"], profile, start)
        levels = [level, *(attempt.params["level"] for attempt in found)]
        ranks = [tightest_first.index(each) for each in levels]
        assert ranks == sorted(ranks, reverse=True), (profile, levels)
        assert levels[-1] == widest, (profile, levels)
        assert found[-1].format.endswith(f"-{widest}"), (profile, levels)


def test_a_calibration_that_does_not_fit_is_left_out() -> None:
    (following, *more) = chain("quantize", ["CALIBRATION_MISMATCH"], Profile.BALANCED, START["quantize"])
    assert following.params == {**START["quantize"], "calibrated": False}
    assert "without data" in following.warning
    assert not more

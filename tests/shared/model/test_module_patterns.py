"""Whatever expressions a configuration has, they are matched or refused in bounded time and memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway.errors import CheckpointValidationError, StageError
from slipway.model import module_patterns
from slipway.model.module_patterns import check_patterns
from support.hostile.json_grammar import answer

NAMES = [f"model.layers.{number}.self_attn.{part}_proj" for number in range(4) for part in "qkvo"]


#: What peft makes of the texts of an option.
FORMS = {
    "target_modules": ("{}", r"(^|.*\.){}($|\..*)"),
    "exclude_modules": ("{}",),
    "rank_pattern": (r"(.*\.)?({})$",),
    "layers_pattern": (r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",),
}


@settings(max_examples=20)
@given(
    option=st.sampled_from([*FORMS, "a_new_option"]),
    text=st.one_of(
        st.sampled_from([r".*\.(q|k)_proj", "(" * 300, "a{99999999999999}", "(?i)" + r"[\x00-\U0010ffff]" * 900, "(?<=a*)b", "\ud800*"]),
        st.text(alphabet="ab.*+?(|)[]{}\\d9^$", max_size=12),
        st.text(alphabet="ab.)[]{}\\^$\n\u2028", max_size=3),
    ),
)  # fmt: skip
def test_patterns(option: str, text: str) -> None:
    config = {option: {text: 4} if option == "rank_pattern" else text}
    if answer(lambda: check_patterns(config, NAMES), seconds=1.5) is None:
        for form in FORMS.get(option, ()):
            re.compile(form.replace("{}", text))


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("rank_pattern", "["),
        ("rank_pattern", "a)"),
        ("alpha_pattern", "\\"),
        ("target_modules", "["),
        ("target_modules", "(?\n)"),
        ("target_modules", "(?\u2028)"),
        ("layers_pattern", "a)b"),
    ],
)
def test_what_is_no_expression_is_refused_before_peft_reads_it(option: str, text: str) -> None:
    found = answer(lambda: check_patterns({option: {text: 8} if option.endswith("k_pattern") else text}, NAMES))
    assert isinstance(found, CheckpointValidationError)
    assert found.reason == "ADAPTER_CONFIG_INVALID"
    assert f"{option} has {text!r}, which is not a regular expression (" in found.message


def test_the_time_of_all_expressions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_patterns, "MOST_SECONDS", 0.2)
    names = [f"{'a' * 30}{number}" for number in range(1000)]
    found = answer(lambda: check_patterns({"rank_pattern": {f"(a*)*x{number}": 8 for number in range(100)}}, names))
    assert isinstance(found, CheckpointValidationError)
    assert "0.2 s of processor time" in found.message


def test_the_time_by_the_clock_is_bounded_and_not_for_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_patterns, "_WAIT_SECONDS", 0.1)
    found = answer(lambda: check_patterns({"target_modules": r"(.*)*x"}, NAMES))
    assert isinstance(found, CheckpointValidationError)
    assert found.reason == "ADAPTER_CONFIG_INVALID"


def test_every_form_of_an_expression_counts() -> None:
    names = [f"a{number}" for number in range(10_000)]
    found = answer(lambda: check_patterns({"of_a_later_peft": [f"a{number}.*" for number in range(1000)]}, names))
    assert isinstance(found, CheckpointValidationError)
    assert "1000 expressions for 10000 modules" in found.message


def test_expressions_that_are_compiled_for_every_name_are_bounded() -> None:
    names = [f"model.layers.{number}.self_attn.q_proj" for number in range(30)]
    patterns = {rf"layers\.{number}\.(q|k)_proj": 8 for number in range(10_000)}
    found = answer(lambda: check_patterns({"rank_pattern": patterns}, names))
    assert isinstance(found, CheckpointValidationError)
    assert "10000 expressions for 30 modules" in found.message


def test_a_trial_that_was_ended_before_it_began_is_not_the_adapters_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel ends what has no memory."""
    (tmp_path / "trial.py").write_text(
        "import os, signal, sys\nsys.stdin.read()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setattr(module_patterns, "_TRIAL", tmp_path / "trial.py")
    with pytest.raises(StageError, match="could not be tried out") as caught:
        check_patterns({"target_modules": ".*q_proj"}, NAMES)
    assert caught.value.reason == "OUT_OF_MEMORY"


@pytest.mark.parametrize("option", ["target_modules", "rank_pattern", "exclude_modules", "of_a_later_peft"])
def test_a_pattern_that_is_never_done_is_refused(option: str) -> None:
    text = r"(.*)*x"
    config = {option: {text: 4} if option == "rank_pattern" else text}
    found = answer(lambda: check_patterns(config, NAMES), seconds=1.5)
    assert isinstance(found, CheckpointValidationError)
    assert found.reason == "ADAPTER_CONFIG_INVALID"
    assert text in found.message
    assert option in found.message


@pytest.mark.parametrize(
    "text",
    [
        r".*\.(q_proj|k_proj|v_proj|o_proj)",
        r"^(?!.*visual).*(?:q_proj|down_proj)$",
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp|ffn).*?(?:k_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:k_proj))",
    ],
)
def test_usual_patterns_are_taken(text: str) -> None:
    names = [f"model.layers.{number}.self_attn.{part}_proj" for number in range(200) for part in "qkvo"]
    check_patterns({"target_modules": text}, names)

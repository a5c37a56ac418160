"""The form of a new export: its fields become the flags of the command, and hostile ones are refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from slipway.console.at_coordinator import digests_of, load
from slipway.console.wish import Wish
from slipway.errors import ConfigurationError

DIGEST = "sha256:" + "1" * 64


def test_fields_are_read_as_a_browser_sends_them() -> None:
    wish = Wish.of(
        [
            ("run", " runs/a "),
            ("base", ""),
            ("formats", "gguf:q4_k_m"),
            ("formats", "onnx:none"),
            ("target", ""),
            ("settings", "validation.test_samples=2\r\n\r\n optimization.method=rtn \r\n"),
            ("unknown", "is left alone"),
        ]
    )
    assert (wish.run, wish.formats) == ("runs/a", ("gguf:q4_k_m", "onnx:none"))
    assert wish.assignments == ("validation.test_samples=2", "optimization.method=rtn")
    assert not wish.is_empty
    assert Wish.of([("formats", "onnx:none")]).is_empty


def test_it_is_loaded_and_shown_as_the_command() -> None:
    wish = Wish("my runs/a", "base", ("gguf:q4_k_m", "onnx:int8"), out="o", assignments=("validation.test_samples=2",))
    configuration = wish.load(environment={}).configuration
    assert configuration.checkpoint.path == str(Path.cwd() / "my runs/a")
    assert [each.name for each, _ in configuration.formats.enabled()] == ["onnx", "gguf"]
    assert configuration.validation.test_samples == 2
    words = shlex.split(wish.command("--coordinator", "c:1"))
    assert words[:5] == ["slipway", "export", "my runs/a", "-f", "gguf:q4_k_m,onnx:int8"]
    assert words[-2:] == ["--coordinator", "c:1"]


@pytest.mark.parametrize(
    "fields",
    [
        [("run", "a" * 5000)],
        [("run", "a\u202eb")],
        [("base", "a\x1b[31m")],
        [("formats", "onnx:int8")] * 100,
        [("settings", "\n".join(["validation.test_samples=2"] * 100))],
    ],
)
def test_what_no_person_types_is_refused(fields: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Wish.of(fields)
    assert caught.value.reason == "CONFIGURATION_INVALID"
    assert "\x1b" not in str(caught.value)


def test_a_wish_with_settings_that_are_wrong_names_them_all() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Wish("a", formats=("nothing:int8",), assignments=("validation.test_samples=many",)).load(environment={})
    assert "nothing" in str(caught.value)
    assert "test_samples" in str(caught.value)


def test_sources_of_a_coordinator_are_addresses_or_digests() -> None:
    configuration = load(Wish(DIGEST, "s3://bucket/base", ("gguf:q8_0",)))
    assert digests_of(configuration) == {"adapter": DIGEST}


@pytest.mark.parametrize(
    "wish",
    [
        Wish("/etc", DIGEST),
        Wish("~/run", DIGEST),
        Wish(DIGEST, "relative"),
        Wish("file:///etc", DIGEST),
        Wish(DIGEST, DIGEST, assignments=("base_model.name=/etc",)),
        Wish(DIGEST, DIGEST, assignments=("checkpoint.path=/etc",), target="cpu-server"),
        Wish(DIGEST, DIGEST, assignments=("validation.heldout=/etc/passwd",)),
        Wish(DIGEST, DIGEST, assignments=("optimization.calibration.text=/etc/passwd",)),
        Wish(DIGEST, DIGEST, assignments=("validation.test_input_samples=/etc/passwd",)),
    ],
    ids=str,
)
def test_a_coordinator_reads_none_of_its_own_files_for_a_page(wish: Wish, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file of the coordinator's machine is looked for")

    monkeypatch.setattr("slipway.advice.for_target.subject_of", refuse)
    with pytest.raises(ConfigurationError) as caught:
        load(wish)
    assert caught.value.reason in {"SOURCE_NOT_ALLOWED", "CONFIGURATION_INVALID"}


def test_variables_of_a_coordinator_are_no_settings_of_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORT_OUTPUT_DIR", "/secret/place")
    monkeypatch.setenv("EXPORT_ENABLE_ONNX", "false")
    configuration = load(Wish(DIGEST, DIGEST))
    assert "secret" not in configuration.output.directory
    assert configuration.formats.onnx.enabled

"""``output.target`` without a format makes what is recommended for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipway import load_configuration
from slipway.configuration import LoadedConfiguration
from slipway.errors import ConfigurationError
from slipway.formats.targets import ALIASES, TARGETS, target_name
from support.models import tiny_models
from support.models.family_models import make_family_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    tiny_models.make_base(folder / "base")
    return tiny_models.make_checkpoint(folder / "base", folder / "run", step=5).parent


def chosen(run: Path | str, target: str, *sets: str, requested: tuple[str, ...] = (), **environment: str) -> str:
    return outputs(loaded(run, target, *sets, requested=requested, **environment))


def loaded(
    run: Path | str, target: str, *sets: str, requested: tuple[str, ...] = (), **environment: str
) -> LoadedConfiguration:
    flags = {"RUN": str(run), "--target": target or None}
    return load_configuration(None, environment=environment, flags=flags, assignments=sets, requested=requested)


def outputs(found: LoadedConfiguration) -> str:
    configuration = found.configuration
    return " ".join(
        each.output_name(level)
        for each, _ in configuration.formats.enabled()
        for level in (*([""] if configuration.unquantized(each.name) else []), *configuration.levels(each.name))
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("ollama", "gguf-q4_k_m"),
        ("LLAMA.CPP", "gguf-q4_k_m"),
        ("vLLM", "pytorch"),
        ("cpu-server", "onnx-int4"),
        ("browser", "onnx-int4"),
        ("android", "executorch-8da4w"),
    ],
)
def test_a_target_makes_what_is_recommended(run: Path, target: str, expected: str) -> None:
    found = loaded(run, target)
    assert outputs(found) == expected
    assert found.configuration.output.target == target_name(target)
    assert not [warning for warning in found.warnings if "output.target" in warning]
    assert chosen(run, "", EXPORT_TARGET=target) == expected


def test_a_loaded_configuration_takes_another_target(run: Path) -> None:
    """The formats of its old target go, those that somebody named stay, and every warning is said once."""
    before = loaded(run, "ollama")
    after = load_configuration(before, environment={}, flags={"--target": "browser"})
    assert outputs(after) == "onnx-int4"
    assert after.configuration.output.target == "browser"
    assert outputs(load_configuration(before, environment={})) == outputs(before) == "gguf-q4_k_m"
    named = loaded(run, "ollama", requested=("onnx:int8",))
    again = load_configuration(named, environment={})
    assert (outputs(again), again.warnings) == ("onnx-int8", named.warnings)
    unread = load_configuration(loaded("nowhere", "ollama", "base_model.name=none"), environment={})
    assert len([warning for warning in unread.warnings if "output.target" in warning]) == 1


def test_an_encoder_gets_what_runs_encoders(tmp_path: Path) -> None:
    make_family_model("bert-classes", tmp_path)
    flags = {"--base-model": str(tmp_path), "--target": "cpu-server"}
    assert outputs(load_configuration(None, environment={}, flags=flags)) == "onnx-int8_dynamic"


def test_named_formats_are_left_as_they_are(run: Path) -> None:
    assert chosen(run, "ollama", requested=("onnx:int8",)) == "onnx-int8"
    assert "gguf" not in chosen(run, "ollama", "formats.onnx.enabled=true")
    assert chosen(run, "ollama", EXPORT_ENABLE_OPENVINO="true") == "pytorch onnx openvino"
    assert any("output.target" in warning for warning in loaded(run, "ollama", requested=("onnx:int8",)).warnings)


def test_settings_that_name_no_format_do_not_hinder_the_choice(run: Path) -> None:
    assert chosen(run, "cpu-server", "formats.onnx.opset_version=18", "formats.tensorrt.enabled=false") == "onnx-int4"
    assert chosen(run, "cpu-server", "formats.onnx.enabled=false") == "openvino-int4"
    assert chosen(run, "cpu-server", "optimization.quantization=int8") == "onnx-int8"
    assert chosen(run, "ollama", "optimization.quantization=q8_0") == "gguf-q8_0"


@pytest.mark.parametrize(
    ("target", "sets", "key", "words"),
    [
        ("olama", (), "output.target", "did you mean ollama"),
        ("ollama", ("optimization.quantization=int8",), "optimization.quantization", "gguf-q4_k_m"),
        ("browser", ("formats.onnx.enabled=false",), "output.target", "are off"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_what_can(
    run: Path, target: str, sets: tuple[str, ...], key: str, words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        loaded(run, target, *sets)
    (problem,) = json.loads(caught.value.about["problems"])
    assert problem["key"] == key
    assert words in problem["message"] + problem["remedy"]


def test_a_model_that_is_elsewhere_is_taken_for_one_that_writes_text_and_that_is_said() -> None:
    found = loaded("s3://bucket/run", "cpu-server")
    assert outputs(found) == "onnx-int4"
    (warning,) = [warning for warning in found.warnings if "output.target" in warning]
    assert "name formats with -f" in warning


def test_every_other_name_is_of_a_target() -> None:
    assert set(ALIASES.values()) <= set(TARGETS)
    assert not set(ALIASES) & set(TARGETS)

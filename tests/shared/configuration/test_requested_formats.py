"""``-f``: what it names is made, and nothing else; what is unknown is answered with the near ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipway.configuration import LoadedConfiguration, load
from slipway.errors import ConfigurationError
from slipway.formats.registry import formats

YAML = """\
export:
  checkpoint: {path: run}
  optimization: {quantization: int8}
  formats:
    pytorch: {enabled: true, quantization: int4}
    onnx: {enabled: true, opset_version: 18, unquantized: false}
    openvino: {enabled: true, quantization: int8}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "export.yaml"
    path.write_text(YAML)
    return path


def asked(file: Path | None, *requested: str, sets: tuple[str, ...] = (), **environment: str) -> LoadedConfiguration:
    flags = {} if file else {"RUN": "run"}
    return load(file, environment=environment, flags=flags, assignments=sets, requested=requested)


def made(found: LoadedConfiguration) -> dict[str, tuple[str, ...]]:
    """The outputs of each enabled format: its levels, with an empty one for the unquantized output."""
    configuration = found.configuration
    return {
        each.name: (*([""] if configuration.unquantized(each.name) else []), *configuration.levels(each.name))
        for each, _ in configuration.formats.enabled()
    }


def refused(file: Path | None, *requested: str, sets: tuple[str, ...] = (), **environment: str) -> list[dict[str, str]]:
    with pytest.raises(ConfigurationError) as caught:
        asked(file, *requested, sets=sets, **environment)
    found: list[dict[str, str]] = json.loads(caught.value.about["problems"])
    return found


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (("gguf",), {"gguf": ("",)}),
        (("gguf:q4_k_m",), {"gguf": ("q4_k_m",)}),
        (("gguf:none+q4_k_m",), {"gguf": ("", "q4_k_m")}),
        (("gguf:f16+q8_0",), {"gguf": ("", "q8_0")}),
        (("GGUF:Q4_K_M, ONNX:Int8",), {"onnx": ("int8",), "gguf": ("q4_k_m",)}),
        (("gguf:q4_k_m", "gguf:q8_0", "pytorch"), {"pytorch": ("",), "gguf": ("q4_k_m", "q8_0")}),
        (("gguf:q4_k_m+q4_k_m",), {"gguf": ("q4_k_m",)}),
        (("tensorrt_llm",), {"tensorrt_llm": ("",)}),
        (("onnx:int8+none", "adapter"), {"onnx": ("", "int8"), "adapter": ("",)}),
    ],
)
def test_what_is_named_is_made_and_nothing_else(
    file: Path, requested: tuple[str, ...], expected: dict[str, tuple[str, ...]]
) -> None:
    for where in (file, None):
        found = asked(where, *requested)
        assert made(found) == expected
        assert not [warning for warning in found.warnings if "not applied" in warning]
    assert made(asked(file, *requested, EXPORT_QUANTIZATION_LEVEL="int4", EXPORT_ENABLE_LITERT="true")) == expected


def test_other_settings_of_a_named_format_stay(file: Path) -> None:
    found = asked(file, "onnx:int8")
    assert found.configuration.formats["onnx"].opset_version == 18  # type: ignore[attr-defined]
    assert found.origins["formats.onnx.quantization"] == "-f onnx:int8"
    assert found.origins["formats.onnx.opset_version"].startswith("export.yaml")


def test_an_option_may_be_a_setting(file: Path) -> None:
    found = asked(file, "onnx:int4+opset_version=17+packaging=genai+packaging=TRANSFORMERS_JS", "adapter:targets=gguf")
    onnx, adapter = found.configuration.formats["onnx"], found.configuration.formats["adapter"]
    assert (onnx.opset_version, onnx.packaging) == (17, ("genai", "transformers_js"))  # type: ignore[attr-defined]
    assert adapter.targets == ("gguf",)  # type: ignore[attr-defined]
    found = asked(None, "onnx:activations.layers=last")
    assert made(found) == {"onnx": ("",)}


@pytest.mark.parametrize(
    ("requested", "fault", "remedy"),
    [
        ("ggml", "'ggml' is not a format", "gguf"),
        ("open-vino", "'open-vino' is not a format", "did you mean openvino?"),
        ("tflite", "'tflite' is not a format", "did you mean litert?"),
        ("safetensors", "'safetensors' is not a format", "pytorch"),
        ("ollama", "'ollama' is a target", "--target ollama"),
        ("vLLM:int4", "'vLLM' is a target", "--target vllm"),
        ("gguf:q4km", "'q4km' is not a level of gguf", "did you mean q4_k_m?"),
        ("gguf:Q4_K_S", "'Q4_K_S' is not a level of gguf", "q4_k_m"),
        ("gguf:int4", "int4 is not delivered as gguf", "write gguf:q4_k_m"),
        ("onnx:q4_k_m", "q4_k_m is not a level of onnx", "there is gguf:q4_k_m"),
        ("onnx:int88", "'int88' is not a level of onnx", "int8"),
        ("adapter:int4", "has no levels", "targets="),
        ("adapter:gguf", "is a value of its setting targets", "write adapter:targets=gguf"),
        ("onnx:opset=17", "is not a setting", "opset_version"),
        ("onnx:opset_version=seventeen", "is not a whole number", "digits"),
        ("onnx:opset_version=17+opset_version=18", "is given twice", "keep one"),
        ("onnx:enabled=false", "is what -f itself says", "write onnx"),
        ("gguf:", "names no option", "q4_k_m"),
        (",", "names no format", "gguf"),
        (":int8", "is not a format", "gguf"),
    ],
)
def test_what_is_unknown_is_answered_with_the_near_ones(requested: str, fault: str, remedy: str) -> None:
    (problem,) = refused(None, requested)
    assert fault in problem["message"]
    assert remedy in problem["remedy"]


def test_all_problems_are_reported_at_once() -> None:
    assert len(refused(None, "ggml,gguf:q4km,onnx:q4_k_m", "litert:int4")) == 4
    assert len(refused(None, ",".join(["nonesuch"] * 10_000))) == 1


@pytest.mark.parametrize(
    ("sets", "key", "fault"),
    [
        ("optimization.quantization=int8", "optimization.quantization", "has no effect beside -f"),
        ("formats.gguf.enabled=true", "formats.gguf.enabled", "contradicts -f"),
        ("formats.onnx.quantization=int4", "formats.onnx.quantization", "contradicts -f onnx:int8"),
        ("formats.gguf.quantization=q4_k_m", "formats.gguf.quantization", "the format gguf is off"),
    ],
)
def test_flags_that_say_otherwise_are_refused(file: Path, sets: str, key: str, fault: str) -> None:
    (problem,) = refused(file, "onnx:int8", sets=(sets,))
    assert problem["key"] == key
    assert fault in problem["message"]


def test_flags_that_say_the_same_are_taken(file: Path) -> None:
    found = asked(file, "onnx:int8", sets=("formats.onnx.quantization=int8", "formats.onnx.opset_version=17"))
    assert made(found) == {"onnx": ("int8",)}


def test_a_level_for_a_format_that_is_off_is_refused_wherever_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "export.yaml"
    file.write_text("export: {checkpoint: {path: run}, formats: {gguf: {quantization: [q8_0, q4_k_m]}}}")
    for problems in (
        refused(file),
        refused(None, sets=("formats.gguf.quantization=q8_0,q4_k_m",)),
        refused(None, EXPORT_GGUF_QUANTIZATION="q8_0,q4_k_m"),
    ):
        (problem,) = problems
        assert problem["message"] == "q8_0, q4_k_m are asked for, and the format gguf is off"
        assert "formats.gguf.enabled: true" in problem["remedy"]
        assert "-f gguf:q8_0+q4_k_m" in problem["remedy"]


def test_a_format_that_a_later_source_turns_off_takes_its_levels_along(file: Path) -> None:
    found = asked(file, sets=("formats.openvino.enabled=false",), EXPORT_ENABLE_PYTORCH="false")
    assert made(found) == {"onnx": ("int8",)}


@pytest.mark.parametrize("name", list(formats()))
def test_every_format_can_be_named_with_each_of_its_levels(name: str) -> None:
    more = "+targets=sm89" if name == "tensorrt" else ""
    for level in formats()[name].levels:
        assert made(asked(None, f"{name}:{level}{more}")) == {name: (level,)}
    plain = f":{more[1:]}" if more else ""
    assert made(asked(None, f"{name}{plain}")) == {name: ("",)}

"""``slipway recommend``: what it names can be made and runs on the target; what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml

from slipway.advice.candidates import Subject, recommend, settings_for
from slipway.advice.measured import read_measured
from slipway.configuration import load
from slipway.errors import ArtifactError, ConfigurationError
from slipway.formats.registry import formats
from slipway.formats.targets import TARGETS, Fit, Target
from slipway.model.configuration import ModelConfig
from slipway.sizes import ModelSize
from support.commands.cli import in_process
from support.models.tiny_models import make_base

SIZE = ModelSize(
    weights=600_000_000, weight_bytes=1_200_000_000, largest=155_000_000, largest_bytes=310_000_000, companion_bytes=0
)


def subject(family: str = "decoder", cache: int = 400_000_000) -> Subject:
    return Subject(Path("model"), family, SIZE, cache)


def test_every_target_has_a_name_in_settings_and_a_format() -> None:
    assert set(get_args(Target)) == {"", *TARGETS}
    for each in formats().values():
        for fit in each.fits:
            assert fit.why
            assert not fit.why.endswith(".")


@pytest.mark.parametrize("target", ["browser", "cpu-server", "nvidia", "vllm", "edge", "android"])
def test_the_configuration_that_is_printed_makes_what_is_recommended(target: str, tmp_path: Path) -> None:
    best = recommend(target, subject=subject())[0]
    text = settings_for(best, target, model="merged")
    file = tmp_path / "export.yaml"
    file.write_text(text)
    loaded = load(file, environment={})
    enabled = [each.name for each, _ in loaded.configuration.formats.enabled()]
    assert enabled == [best.format]
    assert loaded.configuration.levels(best.format) == ((best.level,) if best.level else ())
    assert not [warning for warning in loaded.warnings if "output.target" in warning]
    assert yaml.safe_load(text)["export"]["base_model"] == {"name": "merged"}


def test_a_limit_of_memory_leaves_out_what_needs_more() -> None:
    roomy, tight = (recommend("cpu-server", subject=subject(), memory=size << 20) for size in (8192, 1200))
    assert not any(one.unfit for one in roomy)
    assert {one.output for one in tight if one.unfit} >= {"onnx", "pytorch"}
    assert tight[0].output == "onnx-int4"
    with pytest.raises(ConfigurationError, match="smallest output, onnx-int4") as caught:
        recommend("cpu-server", subject=subject(), memory=100 << 20)
    assert caught.value.reason == "TARGET_UNFIT"


def test_a_family_gets_what_runs_it() -> None:
    assert recommend("cpu-server", subject=subject("sequence classifier", 0))[0].output == "onnx-int8_dynamic"
    with pytest.raises(ConfigurationError, match="sequence classifier"):
        recommend("vllm", subject=subject("sequence classifier", 0))


def test_what_a_stage_refuses_is_not_recommended() -> None:
    config = ModelConfig({"architectures": ["GPTJForCausalLM"], "model_type": "gptj"})
    unknown_to_llama_cpp = Subject(Path("model"), "decoder", SIZE, 0, config)
    found = recommend("cpu-server", subject=unknown_to_llama_cpp)
    assert {one.output for one in found if one.unfit} >= {"gguf-q4_k_m"}
    assert found[0].format == "onnx"
    with pytest.raises(ConfigurationError, match="GPTJ"):
        recommend("llama.cpp", subject=unknown_to_llama_cpp)


def test_a_variant_is_recommended_by_the_settings_that_ask_for_it(tmp_path: Path) -> None:
    [beside] = [one for one in recommend("llama.cpp", subject=subject()) if one.format == "adapter"]
    assert (beside.output, beside.unfit) == ("adapter-gguf", "")
    file = tmp_path / "export.yaml"
    file.write_text(settings_for(beside, "llama.cpp", model="base"))
    loaded = load(file, environment={})
    assert loaded.configuration.formats["adapter"].targets == ("gguf",)
    assert not [text for text in loaded.warnings if "output.target" in text]
    file.write_text(file.read_text().replace("[gguf]", "[peft, gguf, onnx]"))
    warned = [text.partition(" ")[0] for text in load(file, environment={}).warnings if "output.target" in text]
    assert warned == ["adapter", "adapter-onnx"]


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        recommend("toaster")
    assert caught.value.reason == "TARGET_UNKNOWN"
    with pytest.raises(ValueError, match="toaster"):
        Fit("toaster", "it is warm")


def test_outputs_that_are_unfit_for_the_target_are_named(tmp_path: Path) -> None:
    file = tmp_path / "export.yaml"
    file.write_text(
        "export: {base_model: {name: m}, formats: {pytorch: {quantization: [int3, int4]}, onnx: {enabled: false}}, output: {target: vllm}}"
    )
    warnings = [text for text in load(file, environment={}).warnings if "output.target" in text]
    assert len(warnings) == 1
    assert warnings[0].startswith("pytorch-int3 ")
    file.write_text("export: {base_model: {name: m}, output: {target: toaster}}")
    with pytest.raises(ConfigurationError, match="toaster"):
        load(file, environment={})


def test_a_report_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"result": 3}', '{"result": {"formats": []}}'):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(ArtifactError):
            read_measured(tmp_path)
    (tmp_path / "report.json").write_text(
        '{"result": {"formats": {"onnx": {"size_bytes": true, "mean_kl": 0.5, "status": 3}}}}'
    )
    found = read_measured(tmp_path)["onnx"]
    assert (found.size_bytes, found.mean_kl, found.status) == (None, 0.5, "")


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = make_base(tmp_path / "base")
    report = tmp_path / "report.json"
    report.write_text('{"result": {"formats": {"onnx-int4": {"decode_tokens_per_second": 46.1, "status": "passed"}}}}')
    words = ("recommend", "--target", "cpu-server", "--model", base, "--report", report)
    done = in_process(capfd, *words, "--json", home=tmp_path / "home")
    assert done.code == 0
    assert done.json["family"] == "decoder"
    first = done.json["candidates"][0]
    assert first["size_bytes"] > 0
    assert first["measured"]["decode_tokens_per_second"] == 46.1
    shown = in_process(capfd, *words, home=tmp_path / "home")
    assert "46.1 tokens/s" in shown.out
    assert yaml.safe_load(shown.out[shown.out.index("export:") :])["export"]["output"] == {"target": "cpu-server"}
    refused = in_process(capfd, *words, "--memory", "1MiB", home=tmp_path / "home")
    assert (refused.code, "TARGET_UNFIT" in refused.err) == (6, True)
    for wrong in ("nan", "inf", "-1", "much", "1e9"):
        named = in_process(capfd, *words, "--memory", wrong, "--json", home=tmp_path / "home")
        assert (named.code, named.json["reason"]) == (3, "CONFIGURATION_INVALID")
        assert "--memory" in named.out
    assert in_process(capfd, "recommend", "--target", "browser", "--memory", "1GiB", home=tmp_path / "home").code == 3

"""What is planned for models that take images, and what of them is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from slipway.configuration import ExportConfiguration
from slipway.errors import ONNXExportError
from slipway.model.configuration import ModelConfig
from slipway.planning.plan import plan
from slipway.stage import Context
from slipway_onnx_export.forms.pictures.kinds import _KINDS
from slipway_onnx_export.params import PICTURE_TYPES, OnnxExportParams
from slipway_onnx_export.stage import STAGE
from support.models.current_kinds import make_kind
from support.models.onnx_pictures import save_pictured


def _configure(**settings: object) -> ExportConfiguration:
    document = {"checkpoint": {"path": "run"}, "base_model": {"name": "base"}, "formats": {"onnx": settings}}
    return ExportConfiguration.model_validate(document)


@pytest.mark.parametrize(("settings", "wanted"), [({}, None), ({"parts": "text"}, None), ({"parts": "all"}, "all")])
def test_only_what_is_asked_for_is_a_parameter_of_the_plan(settings: dict[str, object], wanted: str | None) -> None:
    tasks = plan(_configure(**settings), {"base", "adapter"})
    params = next(task.params for task in tasks if task.id == "onnx_export")
    assert params.get("parts") == wanted


def test_a_profile_and_recovery_leave_the_shapes_of_graphs_for_images_free() -> None:
    document = _configure(parts="all").model_dump() | {"recovery": {"profile": "conservative"}}
    tasks = plan(ExportConfiguration.model_validate(document), {"base", "adapter"})
    assert next(task.params for task in tasks if task.id == "onnx_export")["shapes"] == "dynamic"
    assert STAGE.recovery is not None
    rules = yaml.safe_load(STAGE.recovery.read_text())["rules"]
    forms = {"shapes": "static", "cache": False, "layered": True}
    fixing = [rule for rule in rules if any(rule["set"].get(name) == value for name, value in forms.items())]
    assert fixing
    assert all(rule["when"]["params.parts"] == {"not_in": ["all"]} for rule in fixing)


def test_every_type_of_the_list_has_a_kind() -> None:
    assert sorted(PICTURE_TYPES) == sorted(_KINDS)


def test_images_of_other_types_are_refused_before_anything_runs(tmp_path: Path) -> None:
    source = save_pictured("aya_vision", tmp_path / "model")
    config = ModelConfig.read(source)
    why = STAGE.forecast.refuses(OnnxExportParams(parts="all"), config)
    assert "aya_vision" in why
    assert "formats.onnx.parts to text" in why
    assert not STAGE.forecast.refuses(OnnxExportParams(), config)
    with pytest.raises(ONNXExportError) as caught:
        STAGE.run({"pytorch": source}, OnnxExportParams(parts="all"), Context(workdir=tmp_path))
    assert caught.value.reason == "FAMILY_UNSUPPORTED"
    assert caught.value.remedy == "export the text part alone"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("qwen3-asr", "qwen3_asr, whose images and sound the ONNX export does not support"),
        ("voxtral", "voxtral, whose images and sound the ONNX export does not support"),
        ("gemma4-audio", "takes sound and no images, and the ONNX export does not support its sound"),
    ],
)
def test_sound_is_refused_before_anything_runs(kind: str, words: str, tmp_path: Path) -> None:
    config = ModelConfig.read(make_kind(kind, tmp_path).base)
    why = STAGE.forecast.refuses(OnnxExportParams(parts="all"), config)
    assert words in why
    assert "formats.onnx.parts to text" in why
    assert not STAGE.forecast.refuses(OnnxExportParams(), config)


def test_a_tower_whose_pictures_have_any_size_is_refused_for_llava() -> None:
    settings = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {"model_type": "mistral"},
    }
    pixtral = ModelConfig({**settings, "vision_config": {"model_type": "pixtral"}})
    clip = ModelConfig({**settings, "vision_config": {"model_type": "clip_vision_model"}})
    assert "pixtral" in STAGE.forecast.refuses(OnnxExportParams(parts="all"), pixtral)
    assert not STAGE.forecast.refuses(OnnxExportParams(parts="all"), clip)


@pytest.mark.parametrize(
    "setting",
    [
        {"shapes": "static"},
        {"engine": "mobius"},
        {"logits_to_keep": 1},
        {"past_present_share_buffer": True},
        {"layered": True},
    ],
)
def test_settings_that_do_not_fit_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="a model that takes images"):
        _configure(parts="all", **setting)
    with pytest.raises(ValueError, match="parts all needs"):
        OnnxExportParams(parts="all", **setting)

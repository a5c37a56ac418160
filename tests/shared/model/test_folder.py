"""An opened model answers from what was read once, and without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipway.errors import CheckpointValidationError
from slipway.model.configuration import ModelConfig
from slipway.model.folder import ModelFolder
from slipway.model.model_files import processor_settings
from slipway.model.weights.parts import ModelPart

NAMES = ("model.embed_tokens.weight", "model.layers.2.eh_proj.weight", "model.visual.patch_embed.proj.weight")


def write_model(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    folder.mkdir()
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    save_file({name: np.zeros((2, 3), np.float32) for name in names}, folder / "model.safetensors")
    return folder


def test_what_was_read_once_is_not_read_again(tmp_path: Path) -> None:
    model = ModelFolder.open(write_model(tmp_path / "model"))
    asked = model.tensors, model.parts, model.generation_settings()
    shutil.rmtree(model.path)
    assert (model.tensors, model.parts, model.generation_settings()) == asked
    assert {name: info.shape for name, info in model.tensors.items()} == dict.fromkeys(NAMES, (2, 3))
    assert model.generation_settings()["eos_token_id"] == 3


def test_every_part_is_answered_also_where_a_model_has_none(tmp_path: Path) -> None:
    model, plain = (
        ModelFolder.open(write_model(tmp_path / "a")),
        ModelFolder.open(write_model(tmp_path / "b", NAMES[:1])),
    )
    assert {part: [each.place for each in tensors] for part, tensors in model.parts.items()} == {
        ModelPart.MULTI_TOKEN_HEAD: ["layers.2.eh_proj.weight"],
        ModelPart.IMAGES_AND_SOUND: ["visual.patch_embed.proj.weight"],
    }
    assert plain.parts == dict.fromkeys(ModelPart, ())


def test_a_folder_without_weights_is_open_until_it_is_asked_for_them(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path, ModelConfig({}))
    assert (model.family, model.generation) == (None, {})
    with pytest.raises(CheckpointValidationError, match=r"neither model\.safetensors nor"):
        _ = model.parts


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"preprocessor_config.json": {"size": 1}}, [{"size": 1}]),
        ({"processor_config.json": {"image_processor": {"size": 2}, "feature_extractor": {"size": 3}}}, [{"size": 2}]),
        (
            {"preprocessor_config.json": {"size": 1}, "processor_config.json": {"image_processor": {"size": 2}}},
            [{"size": 1}, {"size": 2}],
        ),
        ({"preprocessor_config.json": {}, "processor_config.json": {"image_processor": 4}}, []),
        ({"preprocessor_config.json": [1]}, []),
        ({}, []),
    ],
    ids=str,
)
def test_settings_of_a_processor_lie_in_a_file_of_their_own_or_within_another(
    tmp_path: Path, files: dict[str, Any], expected: list[Any]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert processor_settings(tmp_path, "image_processor") == expected


def test_opening_a_model_imports_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from slipway.model.folder import ModelFolder\n"
        f"model = ModelFolder.open(Path({str(write_model(tmp_path / 'model'))!r}))\n"
        "model.parts, model.family, model.generation_settings()\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

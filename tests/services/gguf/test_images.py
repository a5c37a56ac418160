"""The ``mmproj`` file of models that take images: llama.cpp computes what transformers does, and nothing is dropped silently."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("xllamacpp", reason="llama.cpp runs the files: pip install 'slipway-ml[gguf]'")
from slipway.errors import GGUFExportError
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER
from slipway.results.report.environment import markdown_environment
from slipway.stage import Context
from slipway_gguf.files import projector_files
from slipway_gguf.format import FORMAT
from slipway_gguf.vision import ENCODERS, encoder_of, seen_by, why_no_projector
from slipway_gguf.vision.entry import Encoder, Rows, Seen
from slipway_merge.params import MergeParams
from slipway_merge.stage import STAGE as MERGE
from support.models.current_kinds import make_kind
from support.models.gguf_images import Run, run_with_image
from support.models.gguf_models import write_gguf
from support.models.image_models import DEVIATION, KINDS, MEAN, Reference, compute, image_of, make_image_kind

pytestmark = pytest.mark.own_process

_EMBEDDINGS, _PROBABILITIES = 3e-4, 2e-4
"""Largest differences in float32, of embeddings relative to the largest: values between two numbers of float16 are rounded to the other one."""
_ROUNDED = 2e-3
"""The same with weights in float16, beside which llama.cpp rounds activations."""
Tensors = dict[str, torch.Tensor]


def _difference(run: Run, reference: Reference) -> tuple[float, float]:
    own = torch.log_softmax(torch.from_numpy(run.logits).double(), -1).numpy()
    return (
        float(np.abs(run.embeddings - reference.embeddings).max() / np.abs(reference.embeddings).max()),
        float(np.abs(own - reference.distribution).max()),
    )


def _edit(base: Path, change: Callable[[Tensors], None] = lambda _: None, **config: Any) -> Path:
    tensors = load_file(base / "model.safetensors")
    change(tensors)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((base / "config.json").read_text())
    settings["vision_config"] |= config
    (base / "config.json").write_text(json.dumps(settings))
    return base


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if "moe" in each else each for each in KINDS]
)
def test_llama_cpp_sees_what_transformers_sees(name: str, tmp_path: Path) -> None:
    base = make_image_kind(name, tmp_path / "kind")
    file, ctx = write_gguf(base, tmp_path / "work", level="f32")
    [projector] = projector_files(file.parent)
    image = image_of(name)
    run = run_with_image(file, projector, image)
    embeddings, probabilities = _difference(run, compute(name, base, image, run.pieces))
    assert embeddings < _EMBEDDINGS
    assert probabilities < KINDS[name].limit
    other = compute(name, base, image_of(name, seed=2), run.pieces)
    assert _difference(run, other)[1] > 100 * probabilities
    assert "warnings" not in ctx.facts
    assert ctx.facts["parts"] == ["text", "images"]


def test_the_file_is_float16_and_named_beside_quantized_text(tmp_path: Path) -> None:
    base = make_image_kind("gemma3-vision", tmp_path / "kind")
    file, ctx = write_gguf(base, tmp_path / "work", level="q8_0")
    [projector] = projector_files(file.parent)
    assert (file.name, projector.name) == ("tiny-Q8_0.gguf", "tiny-mmproj-F16.gguf")
    images = ctx.facts["images"]
    assert (images["file"], images["type"]) == (projector.name, "F16")
    assert images == json.loads((file.parent / "gguf.json").read_text())["images"]
    assert {Path(path).name for path in ctx.digests} == {file.name, projector.name}
    assert all(name.startswith("vision_tower.head.") for name in images["unused"])
    reader = gguf.GGUFReader(projector)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "clip"
    assert fields["general.type"] == "mmproj"
    assert fields["clip.projector_type"] == "gemma3"
    assert np.allclose(fields["clip.vision.image_mean"], MEAN)
    assert np.allclose(fields["clip.vision.image_std"], DEVIATION)
    kinds = {each.name: each.tensor_type.name for each in reader.tensors}
    assert kinds["v.blk.0.attn_q.weight"] == kinds["v.patch_embd.weight"] == "F16"
    assert kinds["v.position_embd.weight"] == kinds["v.blk.0.attn_q.bias"] == "F32"
    image = image_of("gemma3-vision")
    run = run_with_image(file, projector, image)
    assert _difference(run, compute("gemma3-vision", base, image, run.pieces))[0] < _ROUNDED
    lines = (file.parent / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./tiny-Q8_0.gguf"
    assert lines[2] == "# FROM ./tiny-mmproj-F16.gguf"


def test_a_lora_of_the_image_encoder_is_in_the_file(tmp_path: Path) -> None:
    kind = make_kind("qwen3-vl", tmp_path / "kind")
    base = make_image_kind("qwen3-vl", tmp_path / "same")
    for name in ("config.json", "preprocessor_config.json"):
        (kind.base / name).write_bytes((base / name).read_bytes())
    (tmp_path / "merge").mkdir()
    inputs = {"base": kind.base, "adapter": kind.adapter}
    merged = MERGE.run(inputs, MergeParams(), Context(workdir=tmp_path / "merge"))["pytorch"]
    file, _ = write_gguf(merged, tmp_path / "work", level="f32")
    before, _ = write_gguf(kind.base, tmp_path / "before", level="f32")
    one, other = (gguf.GGUFReader(projector_files(each.parent)[0]).tensors for each in (file, before))
    changed = {own.name for own, old in zip(one, other, strict=True) if not np.array_equal(own.data, old.data)}
    assert {"v.blk.1.attn_qkv.weight", "v.blk.0.ffn_up.weight", "v.deepstack.0.fc1.weight", "mm.2.weight"} <= changed
    assert not {"v.patch_embd.weight", "v.blk.0.ln1.weight"} & changed
    image = image_of("qwen3-vl")
    run = run_with_image(file, projector_files(file.parent)[0], image)
    embeddings, probabilities = _difference(run, compute("qwen3-vl", merged, image, run.pieces))
    assert embeddings < _EMBEDDINGS
    assert probabilities < _PROBABILITIES


def _add(tensors: Tensors) -> None:
    tensors["model.visual.blocks.0.attn.gate.weight"] = torch.zeros(2, 2)


def _remove(tensors: Tensors) -> None:
    del tensors["model.visual.blocks.1.mlp.linear_fc2.bias"]


def _flatten(tensors: Tensors) -> None:
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(32, 96)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_add, "attn.gate.weight"),
        (_remove, "visual.blocks.1.mlp.linear_fc2.bias"),
        (_flatten, "patch_embed.proj.weight"),
    ],
)
def test_a_tensor_without_a_place_is_an_error(change: Callable[[Tensors], None], named: str, tmp_path: Path) -> None:
    base = _edit(make_image_kind("qwen3-vl", tmp_path / "kind"), change)
    with pytest.raises(GGUFExportError, match=named) as caught:
        write_gguf(base, tmp_path / "work")
    assert caught.value.reason == "GGUF_INVALID"


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("qwen2.5-vl", {"window_size": 56}, "window_size is 56"),
        ("qwen2.5-vl", {"fullatt_block_indexes": [0]}, "fullatt_block_indexes is"),
        ("qwen3-vl", {"spatial_merge_size": 1}, "spatial_merge_size is 1"),
        ("mistral3", {"rope_parameters": {"rope_theta": 100.0}}, "rope_theta is 100"),
    ],
)
def test_settings_that_llama_cpp_sees_otherwise_leave_the_text_alone(
    name: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    base = _edit(make_image_kind(name, tmp_path / "kind"), **settings)
    file, ctx = write_gguf(base, tmp_path / "work")
    assert not projector_files(file.parent)
    assert ctx.facts["parts"] == ["text"]
    [warning] = ctx.facts["warnings"]
    assert words in warning


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (None, "no preprocessor_config.json"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"rescale_factor": math.nan}, "rescale_factor"),
        ({"image_std": [1]}, "image_std"),
        ({"image_mean": [math.nan, 0.0, 0.0]}, "image_mean"),
    ],
)
def test_pixels_that_become_other_numbers_leave_the_text_alone(processor: Any, words: str, tmp_path: Path) -> None:
    base = make_image_kind("qwen3-vl", tmp_path / "kind")
    path = base / "preprocessor_config.json"
    path.unlink() if processor is None else path.write_text(json.dumps(processor))
    (base / "processor_config.json").unlink()
    file, ctx = write_gguf(base, tmp_path / "work")
    assert not projector_files(file.parent)
    [warning] = ctx.facts["warnings"]
    assert words in warning


def test_images_that_llama_cpp_computes_otherwise_are_said(tmp_path: Path) -> None:
    base = make_image_kind("gemma4-vision", tmp_path / "kind")
    config = json.loads((base / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = None
    (base / "config.json").write_text(json.dumps(config))
    _, ctx = write_gguf(base, tmp_path / "work")
    [warning] = ctx.facts["warnings"]
    assert "see later tokens" in warning
    assert ctx.facts["images"]["differs"] in warning


def test_tensors_of_sound_are_left_out_and_counted(tmp_path: Path) -> None:
    name = "model.audio_tower.output_proj.weight"
    base = _edit(
        make_image_kind("gemma4-vision", tmp_path / "kind"), lambda tensors: tensors.update({name: torch.ones(2, 2)})
    )
    file, ctx = write_gguf(base, tmp_path / "work")
    assert projector_files(file.parent)
    assert ctx.facts["tensors_of_other_parts"] == 1
    [warning] = ctx.facts["warnings"]
    assert name in warning


def test_an_image_encoder_without_tensors_is_named(tmp_path: Path) -> None:
    def lose(tensors: Tensors) -> None:
        for name in [name for name in tensors if "visual" in name]:
            del tensors[name]

    base = _edit(make_image_kind("qwen3-vl", tmp_path / "kind"), lose)
    file, ctx = write_gguf(base, tmp_path / "work")
    assert not projector_files(file.parent)
    [warning] = ctx.facts["warnings"]
    assert "describes an image encoder, and the model has no tensors of it" in warning


def test_limits_of_linear_layers_are_in_the_file(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        prefix = "model.vision_tower.encoder.layers"
        for layer, module in ((layer, module) for layer in range(2) for module in modules):
            for number, end in enumerate(("input_min", "input_max", "output_min", "output_max")):
                tensors[f"{prefix}.{layer}.{module}.{end}"] = torch.tensor(float(number))

    modules = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    base = _edit(make_image_kind("gemma4-vision", tmp_path / "kind"), add)
    file, _ = write_gguf(base, tmp_path / "work")
    stored = {each.name: each.data for each in gguf.GGUFReader(projector_files(file.parent)[0]).tensors}
    assert stored["v.blk.1.ffn_gate.output_max"].tolist() == [3.0]
    assert stored["v.blk.0.attn_q.input_max"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gemma3-vision", {"vision_tower.": "vision_tower.vision_model."}),
        ("lfm2-vl", {"model.vision_tower.": "model.vision_tower.vision_model."}),
        (
            "mistral3",
            {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
        ),
        ("qwen2.5-vl", {"visual.": "model.visual."}),
    ],
)
def test_names_of_other_versions_give_the_same_file(name: str, published: dict[str, str], tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for old in list(tensors):
            for beginning, new in published.items():
                if old.startswith(beginning):
                    tensors[new + old.removeprefix(beginning)] = tensors.pop(old)

    base = make_image_kind(name, tmp_path / "kind")
    one, _ = write_gguf(base, tmp_path / "one")
    before = projector_files(one.parent)[0].read_bytes()
    other, _ = write_gguf(_edit(base, rename), tmp_path / "other")
    assert projector_files(other.parent)[0].read_bytes() == before
    assert other.read_bytes() == one.read_bytes()


def test_settings_of_the_processor_may_be_in_its_own_file(tmp_path: Path) -> None:
    base = make_image_kind("qwen3-vl", tmp_path / "kind")
    (base / "preprocessor_config.json").unlink()
    settings = {"image_processor": {"image_mean": 0.25, "do_normalize": True}}
    (base / "processor_config.json").write_text(json.dumps(settings))
    file, _ = write_gguf(base, tmp_path / "work")
    reader = gguf.GGUFReader(projector_files(file.parent)[0])
    assert reader.fields["clip.vision.image_mean"].contents() == [0.25] * 3
    assert np.allclose(reader.fields["clip.vision.image_std"].contents(), [0.26862954, 0.26130258, 0.27577711])


def test_the_usage_example_names_the_file() -> None:
    assert FORMAT.usage is not None
    template = markdown_environment().from_string(FORMAT.usage.path.read_text(encoding="utf-8"))
    named = {
        "folder": "gguf",
        "others": [],
        "chat": True,
        "family": DECODER,
        "sound": None,
        "written": "print({})".format,
    }
    code = template.render(entries=["config.json", "a-Q8_0.gguf", "a-mmproj-F16.gguf"], **named)
    assert "llama-cli -m gguf/a-Q8_0.gguf\n" in code
    assert "llama-server -m gguf/a-Q8_0.gguf --mmproj gguf/a-mmproj-F16.gguf\n" in code
    assert "mmproj" not in template.render(entries=["a-mmproj-F16.gguf"], **named).replace("a-mmproj-F16.gguf", "")


def test_files_are_told_apart_whatever_the_model_is_called(tmp_path: Path) -> None:
    def files(*names: str) -> list[str]:
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        return [each.name for each in projector_files(folder)]

    assert files("a-F16.gguf", "a-mmproj-F16.gguf") == ["a-mmproj-F16.gguf"]
    assert files("a-mmproj-F16.gguf") == []
    assert files("a-mmproj-Q4_0.gguf", "a-mmproj-mmproj-F16.gguf") == ["a-mmproj-mmproj-F16.gguf"]
    assert files("a-mmproj-F16.gguf", "a-mmproj-mmproj-F16.gguf") == ["a-mmproj-mmproj-F16.gguf"]


def test_weights_of_the_encoder_beyond_float16_are_said(tmp_path: Path) -> None:
    def enlarge(tensors: Tensors) -> None:
        tensors["model.visual.blocks.0.mlp.linear_fc1.weight"][0, 0] = 1e6

    _, ctx = write_gguf(_edit(make_image_kind("qwen3-vl", tmp_path / "kind"), enlarge), tmp_path / "work")
    assert ctx.facts["images"]["stored_wider"] == ["v.blk.0.ffn_up.weight"]
    assert any("'v.blk.0.ffn_up.weight'" in warning for warning in ctx.facts["warnings"])


@pytest.mark.parametrize("ratio", [5e-324, 4.0])
def test_a_ratio_that_no_image_has_is_refused_by_name(ratio: float, tmp_path: Path) -> None:
    base = make_image_kind("internvl", tmp_path / "kind")
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"downsample_ratio": ratio}))
    with pytest.raises(GGUFExportError, match=r"^downsample_ratio is ") as caught:
        write_gguf(base, tmp_path / "work")
    assert caught.value.reason == "BASE_MODEL_INVALID"


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "gemma3-vision", "mistral3", "internvl", "lfm2-vl"])
def test_no_value_of_a_setting_is_a_fault_of_the_program(name: str, tmp_path: Path) -> None:
    base = make_image_kind(name, tmp_path / "kind")
    settings = json.loads((base / "config.json").read_text())
    encoder = encoder_of(ModelConfig(settings))
    assert encoder is not None
    for part in (settings, settings["vision_config"], settings["text_config"]):
        for key, value in list(part.items()):
            for other in ("x", None, -1, 0, 7, [], {}, [None], [[]], 1 << 40):
                part[key] = other
                config = ModelConfig(settings)
                if encoder_of(config) is encoder and isinstance(config.get("vision_config"), dict):
                    _ask(encoder, seen_by(encoder, config, base))
            part[key] = value


def _ask(encoder: Encoder, seen: Seen) -> None:
    with suppress(GGUFExportError):
        if not why_no_projector(encoder, seen):
            for key in encoder.keys.values():
                key(seen)
            for rows in encoder.tensors.values():
                tuple(rows.layers(seen))
                for place in rows.places:
                    place.piece(seen)


def test_every_name_is_one_of_ggufs() -> None:
    known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MMPROJ]}
    known = {each.format(bid="{}") for each in known} | {
        "mm.0",
        "mm.1",
        "mm.2",
        "mm.model.mlp.0",
        "mm.model.mlp.1",
        "mm.model.mlp.3",
    }
    ends = (".weight.1", ".weight", ".bias", ".input_min", ".input_max", ".output_min", ".output_max")
    for encoder in ENCODERS:
        for rows in (*encoder.tensors.values(), Rows(tuple(encoder.borrowed.values()))):
            for place in rows.places:
                end = next((each for each in ends if place.name.endswith(each)), "")
                assert place.name.removesuffix(end) in known, place.name


def test_defaults_are_those_of_the_classes_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    for encoder in ENCODERS:
        for kind in encoder.kind:
            if kind not in CONFIG_MAPPING:
                continue
            made = CONFIG_MAPPING[kind]()
            made = getattr(made, "vision_config", made)
            for key, value in encoder.defaults.items():
                actual = getattr(made, key)
                assert (tuple(actual) if isinstance(actual, list) else actual) == (
                    tuple(value) if isinstance(value, list) else value
                ), (kind, key)

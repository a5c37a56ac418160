"""Graphs of models that take images: encoder of pictures, embedding and decoder, with planted faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipway.errors import ONNXExportError
from slipway.model.configuration import ModelConfig
from slipway.proof.pictures import DEVIATION, MEAN, arrange
from slipway.proof.runtime import Step
from slipway.stage import Context
from slipway_onnx_export.packaging.packages import write_packages
from slipway_onnx_export.params import PICTURE_TYPES, OnnxExportParams
from slipway_onnx_export.parity.check import check_parity
from slipway_onnx_export.source import open_source
from slipway_onnx_export.stage import STAGE
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_validate.runner.onnx_graphs.load import load
from support.models.genai_runs import genai_library
from support.models.onnx_models import Exported
from support.models.onnx_pictures import (
    AFTER,
    BEFORE,
    change_graph,
    constant,
    continue_by_example,
    continue_by_genai,
    continue_by_transformers,
    load_whole,
    logits_behind,
    picture_of,
    replace_input,
    save_pictured,
    until_end,
    write_png,
)

GRAPHS = ["vision_encoder.onnx", "embedding.onnx", "model.onnx"]
QUICK = "internvl"
_COUNT = 6
Export = Callable[[Path], Exported]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Exported]:
    """A model with one layer, whose embedding is its head too, and its graphs; treat both as read-only."""
    root = tmp_path_factory.mktemp("quick")
    source = save_pictured(
        QUICK, root / "model", num_hidden_layers=1, layer_types=["full_attention"], tie_word_embeddings=True
    )
    context = Context(workdir=root / "work")
    context.workdir.mkdir()
    made = STAGE.run(
        {"pytorch": source}, OnnxExportParams(parts="all", packaging=("transformers_js", "triton")), context
    )
    return source, Exported(made["onnx"], context.facts)


def _assert_right(source: Path, exported: Exported) -> None:
    """Assert what the export says of its comparison, and that the delivered example continues pictures and text as transformers does."""
    facts = exported.facts
    assert facts["parity"] == "passed"
    assert facts["parts"] == ["text", "images"]
    assert facts["files"] == GRAPHS
    for name in ("parity_max_abs_diff", "parity_image_features", "parity_inputs_embeds"):
        assert facts[name] < 1e-4
    model = load_whole(source)
    behind = []
    for seed, tokens in ((11, (3, 5)), (12, (3, 5)), (13, (6, 4))):
        picture, prompt = picture_of(model, seed=seed, tokens=tokens)
        wanted = until_end(continue_by_transformers(model, prompt, picture, _COUNT), source)
        assert continue_by_example(exported.folder, prompt, picture, _COUNT) == wanted
        behind.append(logits_behind(exported.folder, prompt, picture)[-1])
    text = until_end(continue_by_transformers(model, [5, 6, 7, 8], None, _COUNT), source)
    assert continue_by_example(exported.folder, [5, 6, 7, 8], None, _COUNT) == text
    assert np.abs(behind[0] - behind[1]).max() > 1e-3  # a picture matters


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.slow) for name in PICTURE_TYPES if name != QUICK]
)
def test_each_kind_of_model_reads_pictures_of_any_size_that_it_takes(
    model_type: str, tmp_path: Path, export: Callable[..., Exported]
) -> None:
    source = save_pictured(model_type, tmp_path / "model")
    _assert_right(source, export(source, parts="all"))


def test_a_model_reads_pictures_and_text_alone(quick: tuple[Path, Exported]) -> None:
    _assert_right(*quick)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "mistral3"])
def test_old_opsets_are_traced_and_proven(model_type: str, tmp_path: Path, export: Callable[..., Exported]) -> None:
    source = save_pictured(model_type, tmp_path / "model")
    exported = export(source, parts="all", opset=17, tracer_warnings="prove")
    assert (exported.facts["engine"], exported.opset) == ("legacy", 17)
    _assert_right(source, exported)


def test_a_table_that_two_graphs_read_is_stored_once(quick: tuple[Path, Exported]) -> None:
    source, exported = quick
    rows = ModelConfig.read(source).text["vocab_size"] * ModelConfig.read(source).text["hidden_size"] * 4
    table = next(
        value.const_value
        for value in ir.load(exported.folder / "model.onnx").graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes == rows
    )
    assert isinstance(table, ir.ExternalTensor)
    assert str(table.location) == "embedding.onnx.data"
    assert exported.facts["checks"]["stored once"] == "passed"


def _check(source: Path, folder: Path) -> None:
    check_parity(open_source(source, parts="all"), folder, tolerance=1e-4)


def _case(source: Path, folder: Path) -> str:
    """Return where the comparison finds a fault."""
    with pytest.raises(ONNXExportError) as caught:
        _check(source, folder)
    assert caught.value.reason == "EXPORT_PARITY_FAILED"
    return str(caught.value.about["case"])


def test_features_in_the_wrong_places_are_found(quick: tuple[Path, Exported], tmp_path: Path) -> None:
    source, exported = quick
    folder = Path(shutil.copytree(exported.folder, tmp_path / "graphs"))

    def turn(model: ir.Model) -> None:
        ends = [constant(model, name, [value]) for name, value in (("a", -1), ("b", -(1 << 40)), ("c", 0), ("d", -1))]
        replace_input(model, "image_features", lambda value: [ir.node("Slice", [value, *ends], name="turned")])

    change_graph(folder / "embedding.onnx", turn)
    assert "picture" in _case(source, folder)


def test_the_encoder_of_the_base_is_found_beside_a_merged_text_part(
    quick: tuple[Path, Exported], tmp_path: Path
) -> None:
    source, exported = quick
    merged = Path(shutil.copytree(source, tmp_path / "merged"))
    weights = load_file(merged / "model.safetensors")
    name = next(name for name in sorted(weights) if "vision_tower" in name and name.endswith("proj.weight"))
    weights[name] = weights[name] + 0.02 * torch.randn_like(weights[name])
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    _check(source, exported.folder)
    assert "picture" in _case(merged, exported.folder)


@pytest.mark.slow
def test_positions_that_ignore_rows_and_columns_are_found(tmp_path: Path, export: Callable[..., Exported]) -> None:
    source = save_pictured("qwen2_5_vl", tmp_path / "model", num_hidden_layers=1, layer_types=["full_attention"])
    exported = export(source, parts="all")
    _check(source, exported.folder)

    def flatten(model: ir.Model) -> None:
        time = constant(model, "time", [0, 0, 0])
        replace_input(model, "position_ids", lambda value: [ir.node("Gather", [value, time], {"axis": 0}, name="time")])

    change_graph(exported.folder / "model.onnx", flatten)
    assert "picture" in _case(source, exported.folder)


@pytest.mark.slow
def test_a_picture_of_gemma_3_that_is_attended_to_one_way_is_found(
    tmp_path: Path, export: Callable[..., Exported]
) -> None:
    source = save_pictured(
        "gemma3", tmp_path / "model", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    exported = export(source, parts="all")

    def blind(model: ir.Model) -> None:
        replace_input(model, "token_type_ids", lambda value: [ir.node("Sub", [value, value], name="none")])

    change_graph(exported.folder / "model.onnx", blind)
    assert "picture" in _case(source, exported.folder)


# Levels, validation, packages.


@pytest.mark.parametrize("level", ["fp16", "int8", "int4", "int8_dynamic"])
def test_levels_round_the_text_part_and_keep_the_encoder(
    level: str, quick: tuple[Path, Exported], tmp_path: Path
) -> None:
    _, exported = quick
    context = Context(workdir=tmp_path)
    params = QuantizeParams(format="onnx", level=level, group_size=32)
    folder = next(iter(QUANTIZE.run({"model": exported.folder}, params, context).values()))
    assert context.facts["check"] == "passed"
    encoder, before = (ir.load(each / "vision_encoder.onnx").graph for each in (folder, exported.folder))
    assert [value.const_value.dtype for value in encoder.initializers.values() if value.const_value is not None] == [
        value.const_value.dtype for value in before.initializers.values() if value.const_value is not None
    ]
    embedding = ir.load(folder / "embedding.onnx").graph
    taken = next(value for value in embedding.inputs if value.name == "image_features")
    assert encoder.outputs[0].dtype == taken.dtype
    assert taken.dtype == (ir.DataType.FLOAT16 if level == "fp16" else ir.DataType.FLOAT)
    for name in ("embedding.onnx.data", "model.onnx.data"):
        assert (folder / name).stat().st_size < (exported.folder / name).stat().st_size
    model = load_whole(quick[0])
    picture, prompt = picture_of(model, seed=11)
    assert len(continue_by_example(folder, prompt, picture, 2)) <= 2
    _assert_text_close(quick[0], folder, limit={"fp16": 0.02, "int8": 0.1, "int8_dynamic": 0.3}.get(level, 1.0))


def _assert_text_close(source: Path, folder: Path, *, limit: float) -> None:
    """Assert that validation's runtime gives the logits of transformers for text, at once and one by one."""
    ids = np.array([[5, 6, 7, 8, 9], [0, 0, 11, 12, 13]])
    mask = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    with torch.no_grad():
        wanted = load_whole(source)(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            position_ids=torch.from_numpy(positions),
        ).logits.numpy()
    model = load(folder, threads=1)
    whole, _ = model.forward(Step(ids, mask, positions, None))
    first, past = model.forward(Step(ids[:, :4], mask[:, :4], positions[:, :4], None))
    last, _ = model.forward(Step(ids[:, 4:], mask, positions[:, 4:], past))
    for found in (whole, np.concatenate([first, last], axis=1)):
        assert np.abs(found - wanted)[mask.astype(bool)].max() < limit


@pytest.mark.slow
def test_validation_runs_text_through_embedding_and_decoder(quick: tuple[Path, Exported]) -> None:
    _assert_text_close(quick[0], quick[1].folder, limit=1e-4)


def test_packages_of_other_graphs_are_refused_by_name(quick: tuple[Path, Exported], tmp_path: Path) -> None:
    _, exported = quick
    packages = json.loads((exported.folder / "onnx_export.json").read_text())["packages"]
    assert packages["triton"] == "triton"
    assert "features among embeddings itself" in packages["transformers_js"]
    assert sorted(path.name for path in (exported.folder / "triton").iterdir()) == [
        "embedding",
        "model",
        "vision_encoder",
    ]
    folder = Path(shutil.copytree(exported.folder, tmp_path / "graphs"))
    record = json.loads((folder / "onnx_export.json").read_text())
    (folder / "onnx_export.json").write_text(json.dumps({**record, "packaging": ["genai"]}))
    write_packages(folder, level="", ctx=Context(workdir=tmp_path))
    packages = json.loads((folder / "onnx_export.json").read_text())["packages"]
    assert packages["genai"].startswith("not packaged: onnxruntime-genai takes such graphs of mistral3")
    assert not (folder / "genai_config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_5"])
def test_onnxruntime_genai_continues_a_picture_as_transformers_does(
    model_type: str, tmp_path: Path, export: Callable[..., Exported]
) -> None:
    genai = genai_library()
    source = save_pictured(model_type, tmp_path / "model")
    exported = export(source, parts="all", packaging=("genai",))
    runtime, model = genai.Model(str(exported.folder)), load_whole(source)
    for seed, tokens in ((11, (3, 5)), (12, (6, 4))):
        picture, prompt = picture_of(model, seed=seed, tokens=tokens)
        if picture.types:  # Qwen's pictures stand between two tokens, by which the runtime finds them
            start, end = model.config.vision_start_token_id, model.config.vision_end_token_id
            prompt = [*BEFORE, start, *prompt[len(BEFORE) : -len(AFTER)], end, *AFTER]
        wanted = continue_by_transformers(model, prompt, picture, _COUNT)
        assert until_end(continue_by_genai(genai, runtime, prompt, picture, _COUNT), source) == until_end(
            wanted, source
        )


@pytest.mark.slow
def test_onnxruntime_genai_prepares_an_image_file_as_the_models_processor_does(
    tmp_path: Path, export: Callable[..., Exported]
) -> None:
    genai = genai_library()
    source = save_pictured("qwen2_5_vl", tmp_path / "model", num_hidden_layers=1, layer_types=["full_attention"])
    config = transformers.AutoConfig.from_pretrained(source)
    eye = config.vision_config
    settings = {"patch_size": eye.patch_size, "merge_size": eye.spatial_merge_size, "min_pixels": 64}
    half = {"image_mean": [MEAN] * 3, "image_std": [DEVIATION] * 3}
    (source / "preprocessor_config.json").write_text(json.dumps({**settings, **half}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"], special_tokens=True)
    tokenizer.save_pretrained(source)
    folder = export(source, parts="all", packaging=("genai",)).folder
    side = eye.patch_size * eye.spatial_merge_size
    pixels = np.random.default_rng(0).integers(0, 256, (4 * side, 6 * side, 3), dtype=np.uint8)
    images = genai.Images.open(str(write_png(tmp_path / "image.png", pixels)))
    process = genai.Model(str(folder)).create_multimodal_processor()
    made = process("<|vision_start|><|image_pad|><|vision_end|>", images=images)
    wanted = arrange(config, pixels)
    assert np.abs(made["pixel_values"].as_numpy() - wanted["pixel_values"]).max() < 1e-5
    assert made["image_grid_thw"].as_numpy().tolist() == wanted["image_grid_thw"].tolist()
    assert made["num_image_tokens"].as_numpy().tolist() == [4 * 6]

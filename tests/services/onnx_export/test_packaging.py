"""Packaged folders run as they lie by onnxruntime-genai, and are what Triton and other loaders read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

from slipway.stage import Context
from slipway_onnx_export.packaging.graphs import Interface
from slipway_onnx_export.packaging.packages import complete_level, triton_config, write_packages
from support.models.family_models import make_family_model
from support.models.genai_runs import genai_continuations
from support.models.onnx_models import Exported
from support.models.packaged_models import (
    LEGACY,
    at_level,
    empty_cache,
    greedy,
    padded_source,
    session,
    steps_of_merged,
    steps_of_three_files,
    steps_of_two_files,
)
from support.models.triton_schema import triton_schema


@pytest.mark.parametrize("level", ["", "int4"])
def test_genai_continues_as_the_folder_does(decoder: Exported, tmp_path: Path, level: str) -> None:
    folder = at_level(decoder.folder, level, tmp_path / "level")
    rows = [[5, 9, 17, 4, 30, 8], [7, 3, 21]]
    wanted = [greedy(folder, row, 12) for row in rows]
    assert min(map(len, wanted)) > 2
    alone = [genai_continuations(folder, [row], 12)[0] for row in rows]
    assert alone == wanted
    assert genai_continuations(folder, rows, 12) == wanted  # the shorter row is padded on the right


@pytest.mark.slow
def test_genai_shares_a_buffer_of_past_and_present(
    family: Callable[[str], Path], export: Callable[..., Exported], tmp_path: Path
) -> None:
    """Alone and in a batch whose shorter row is padded on the right, also where only logits of last tokens are computed."""
    served = export(family("qwen3-tied"), past_present_share_buffer=True, logits_to_keep=1, packaging=("genai",))
    rows = [[5, 9, 17, 4, 30, 8], [7, 3, 21]]
    for level in ("", "fp16", "int8", "int4"):
        folder = at_level(served.folder, level, tmp_path / level)
        assert json.loads((folder / "genai_config.json").read_text())["search"]["past_present_share_buffer"] is True
        wanted = [greedy(folder, row, 12) for row in rows]
        assert min(map(len, wanted)) > 2
        alone = [genai_continuations(folder, [row], 12)[0] for row in rows]
        assert alone == wanted
        assert genai_continuations(folder, rows, 12) == wanted


def test_a_levels_record_describes_its_own_graph(decoder: Exported, tmp_path: Path) -> None:
    folder = at_level(decoder.folder, "int4", tmp_path / "level")
    plain, record = (json.loads((each / "onnx_export.json").read_text()) for each in (decoder.folder, folder))
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    assert record["nodes"] == len(graph.node) != plain["nodes"]
    assert record["operators"]["com.microsoft.MatMulNBits"] == sum(node.op_type == "MatMulNBits" for node in graph.node)
    assert record["data_bytes"] == (folder / "model.onnx.data").stat().st_size < plain["data_bytes"]
    assert record["precision"] == "int4"
    assert (record["unquantized"]["nodes"], record["unquantized"]["parity"]) == (plain["nodes"], "passed")
    assert not {"parity", "statistics"} & record.keys()


@pytest.mark.parametrize(("told", "warns"), [({}, True), ({"transformers_js": "not packaged: {}"}, False)], ids=str)
def test_a_package_that_only_a_level_lacks_is_said(
    decoder: Exported, tmp_path: Path, told: dict[str, str], warns: bool
) -> None:
    """Also where the unquantized output was never completed, because its weights were left out."""
    folder, why = tmp_path / "level", "transformers.js has no name for the level int8_dynamic"
    shutil.copytree(decoder.folder, folder)
    record = json.loads((folder / "onnx_export.json").read_text())
    record |= {"packaging": ["transformers_js"], "packages": {name: text.format(why) for name, text in told.items()}}
    (folder / "onnx_export.json").unlink()
    (folder / "onnx_export.json").write_text(json.dumps(record))
    ctx = Context(workdir=tmp_path)
    complete_level(folder, level="int8_dynamic", ctx=ctx)
    warnings = ctx.facts.get("warnings", [])
    assert bool(warnings) is warns
    assert all(f"no transformers_js package at int8_dynamic: {why}" in each for each in warnings)


def test_genai_samples_from_the_distribution_of_the_generation_config(decoder: Exported, tmp_path: Path) -> None:
    """The first token of many rows: none beyond top-k and top-p, and as often as the folder's logits say."""
    from support.models.genai_runs import genai_samples

    folder = tmp_path / "copy"
    shutil.copytree(decoder.folder, folder)
    temperature, most, share = 0.6, 6, 0.8
    search = {"do_sample": True, "temperature": temperature, "top_k": most, "top_p": share}
    (folder / "generation_config.json").write_text(json.dumps({**search, "eos_token_id": 2, "pad_token_id": 1}))
    write_packages(folder, level="", ctx=Context(workdir=tmp_path))
    prompt = [5, 9, 17, 4, 30, 8]
    found = np.bincount(genai_samples(folder, prompt, rows=32, rounds=64), minlength=128)
    (graph, run) = session(folder / "model.onnx")
    places = {"attention_mask": np.ones((1, 6), np.int64), "position_ids": np.arange(6)[None]}
    logits = run({"input_ids": np.array([prompt]), **places, **empty_cache(graph, 1)})["logits"][0, -1]
    order = np.argsort(-logits)[:most]
    chances = np.exp((logits[order] - logits[order[0]]) / temperature)
    chances /= chances.sum()
    kept = np.concatenate([[True], np.cumsum(chances)[:-1] < share])
    wanted = np.zeros(128)
    wanted[order[kept]] = chances[kept] / chances[kept].sum()
    assert 2 <= kept.sum() < most  # both limits leave tokens out, and there is a choice
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(wanted))
    scatter = np.sqrt(wanted * (1 - wanted) / found.sum())
    assert np.all(np.abs(found / found.sum() - wanted) <= 5 * scatter + 1e-9)


def test_genai_config_says_what_the_graph_and_the_model_say(decoder: Exported) -> None:
    config = json.loads((decoder.folder / "genai_config.json").read_text())
    sizes = {
        name: config["model"]["decoder"][name] for name in ("num_hidden_layers", "num_key_value_heads", "head_size")
    }
    assert sizes == {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_size": 32}
    assert (config["model"]["vocab_size"], config["model"]["context_length"]) == (128, 128)
    assert (config["model"]["eos_token_id"], config["model"]["pad_token_id"]) == (2, 1)
    assert config["search"]["do_sample"] is False


def test_a_search_is_taken_from_the_generation_config(decoder: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(decoder.folder, folder)
    search = {"do_sample": True, "top_p": 0.9, "temperature": 0.7, "eos_token_id": [2, 9, 4000], "num_beams": 4}
    (folder / "generation_config.json").write_text(json.dumps(search))
    write_packages(folder, level="", ctx=Context(workdir=tmp_path))
    config = json.loads((folder / "genai_config.json").read_text())
    assert config["model"]["eos_token_id"] == [2, 9]  # the runtime refuses a token outside of the vocabulary
    found = {name: config["search"][name] for name in ("do_sample", "top_k", "top_p", "temperature", "num_beams")}
    assert found == {"do_sample": True, "top_k": 50, "top_p": 0.9, "temperature": 0.7, "num_beams": 1}


def test_weights_of_a_package_take_no_space(decoder: Exported) -> None:
    packaged = decoder.folder / "transformers_js" / "onnx"
    assert sorted(path.name for path in packaged.iterdir()) == ["model.onnx", "model.onnx_data"]
    assert (packaged / "model.onnx_data").samefile(decoder.folder / "model.onnx.data")


def test_levels_of_a_repository_lie_beside_each_other(decoder: Exported, tmp_path: Path) -> None:
    """Copied over each other, the folders of two levels agree in every file that both have, except for the example."""
    other = at_level(decoder.folder, "int8", tmp_path / "level") / "transformers_js"
    own = decoder.folder / "transformers_js"
    both = {
        path.relative_to(own) for path in own.rglob("*") if path.is_file() and (other / path.relative_to(own)).is_file()
    }
    differing = {str(path) for path in both if (own / path).read_bytes() != (other / path).read_bytes()}
    assert Path("config.json") in both
    assert differing == {"example.mjs"}
    assert (other / "onnx" / "model_quantized.onnx_data").is_file()


def test_a_processor_saved_in_one_file_gets_the_file_that_javascript_reads(decoder: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(decoder.folder, folder)
    part = {"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16000}
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": part}))
    write_packages(folder, level="", ctx=Context(workdir=tmp_path))
    assert json.loads((folder / "transformers_js" / "preprocessor_config.json").read_text()) == part


@pytest.mark.parametrize("level", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_an_embedding_of_standard_operators_computes_the_same(decoder: Exported, tmp_path: Path, level: str) -> None:
    """onnxruntime-web has no ``GatherBlockQuantized`` for CPUs."""
    folder = at_level(decoder.folder, level, tmp_path / "level")
    (packaged,) = (folder / "transformers_js" / "onnx").glob("*.onnx")
    (graph, run), (_, run_packaged) = session(folder / "model.onnx"), session(packaged)
    ids = np.random.default_rng(0).integers(0, 128, (3, 7))
    places = {"attention_mask": np.ones((3, 7), np.int64), "position_ids": np.arange(7)[None].repeat(3, 0)}
    feed = {"input_ids": ids, **places, **empty_cache(graph, 3)}
    np.testing.assert_array_equal(run_packaged(feed)["logits"], run(feed)["logits"])
    assert "GatherBlockQuantized" in operators(folder / "model.onnx")
    assert "GatherBlockQuantized" not in operators(packaged)


def operators(path: Path) -> set[str]:
    import onnx

    return {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}


def test_what_cannot_be_packaged_is_told_by_name(
    tmp_path: Path, export: Callable[..., Exported], family: Callable[[str], Path]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(family("qwen3-tied"), source)
    (source / "tokenizer.json").unlink()
    exported = export(source, packaging=("transformers_js",))
    assert exported.facts["packages"] == {
        "transformers_js": "not packaged: transformers.js reads tokenizer.json, and the model has none"
    }
    assert "transformers_js" in exported.facts["warnings"][0]
    assert not (exported.folder / "transformers_js").exists()


# Triton and KServe.


@pytest.mark.slow
def test_a_triton_repository_is_what_its_own_schema_and_the_graph_say(decoder: Exported, tmp_path: Path) -> None:
    from google.protobuf import text_format

    (tmp_path / "triton").mkdir()
    schema = triton_schema(tmp_path / "triton")
    folder = repackaged(decoder.folder, tmp_path / "copy", "kserve")
    (model,) = (folder / "triton").iterdir()
    config = text_format.Parse((model / "config.pbtxt").read_text(), schema.ModelConfig())
    assert (config.name, config.platform, config.HasField("dynamic_batching")) == (model.name, "onnxruntime_onnx", True)
    graph, _ = session(model / "1" / "model.onnx")
    for described, values in ((config.input, graph.get_inputs()), (config.output, graph.get_outputs())):
        found = {each.name: list(each.dims) for each in described}
        assert found == {
            value.name: [size if isinstance(size, int) else -1 for size in value.shape[1:]] for value in values
        }
    assert {schema.DataType.Name(each.data_type) for each in config.input} == {"TYPE_INT64", "TYPE_FP32"}
    assert (model / "1" / "model.onnx_data").samefile(folder / "model.onnx.data")


def test_a_service_of_kserve_runs_the_triton_repository(decoder: Exported, tmp_path: Path) -> None:
    folder = repackaged(decoder.folder, tmp_path / "copy", "kserve")
    service = yaml.safe_load((folder / "kserve.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    model = service["spec"]["predictor"]["model"]
    assert model["modelFormat"] == {"name": "triton"}
    assert Path(model["storageUri"]).name == "triton"


def test_each_graph_of_a_pair_is_a_model_of_triton_at_each_level(
    tmp_path: Path, export: Callable[..., Exported]
) -> None:
    """Every input and output that the graph declares, in order, with its axes; without the rows, which Triton joins."""
    source = make_family_model("marian-two-vocabularies", tmp_path / "model")
    folder = export(source, packaging=("kserve",), parity="never", **LEGACY).folder
    for level, ending, dtype in (("", "", "TYPE_FP32"), ("fp16", "_fp16", "TYPE_FP16")):
        found = at_level(folder, level, tmp_path / "level")
        models = sorted((found / "triton").iterdir())
        assert [model.name for model in models] == [f"decoder_model{ending}", f"encoder_model{ending}"]
        for model in models:
            graph, _ = session(model / "1" / "model.onnx")
            lines = (model / "config.pbtxt").read_text().splitlines()
            assert lines[:3] == [f'name: "{model.name}"', 'platform: "onnxruntime_onnx"', "max_batch_size: 32"]
            wanted = []
            for kind, values in (("input", graph.get_inputs()), ("output", graph.get_outputs())):
                for value in values:
                    sizes = ", ".join(str(size) if isinstance(size, int) else "-1" for size in value.shape[1:])
                    named = "TYPE_INT64" if value.type == "tensor(int64)" else dtype
                    wanted.append(f'{kind} {{ name: "{value.name}" data_type: {named} dims: [ {sizes} ] }}')
            assert lines[3:-1] == wanted
            assert lines[-1].startswith("dynamic_batching")
        service = yaml.safe_load((found / "kserve.yaml").read_text())
        assert service["metadata"]["name"] == "-".join(filter(None, ("slipway", level)))
        assert service["spec"]["predictor"]["model"]["storageUri"].startswith("pvc://")


def test_a_fixed_number_of_rows_is_not_joined() -> None:
    import onnx_ir as ir

    graph = Interface(
        inputs={"input_ids": (1, "sequence")}, outputs={"logits": (1, "sequence", 8)},
        dtypes={"input_ids": ir.DataType.INT64, "logits": ir.DataType.FLOAT16},
    )  # fmt: skip
    assert triton_config("model", graph).splitlines()[2:] == [
        "max_batch_size: 0",
        'input { name: "input_ids" data_type: TYPE_INT64 dims: [ 1, -1 ] }',
        'output { name: "logits" data_type: TYPE_FP16 dims: [ 1, -1, 8 ] }',
    ]


def repackaged(source: Path, target: Path, *kinds: str) -> Path:
    """Return a copy of a folder with other packages; large files are second names of the same."""
    shutil.copytree(source, target, copy_function=os.link)
    record = json.loads((target / "onnx_export.json").read_text())
    (target / "onnx_export.json").unlink()
    (target / "onnx_export.json").write_text(json.dumps({**record, "packaging": kinds}))
    write_packages(target, level="", ctx=Context(workdir=target))
    return target


# Encoder-decoders: one graph has both forms of the decoder.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "params"),
    [
        *((name, LEGACY) for name in ("marian-two-vocabularies", "whisper")),
        *((name, {}) for name in ("bart", "t5")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("engine", "dynamo"),
)
def test_other_files_of_a_decoder_compute_what_the_two_do(
    tmp_path: Path, export: Callable[..., Exported], name: str, params: dict[str, Any]
) -> None:
    """The merged one, and optimum's three: ten steps of rows with padding on both sides, reordered in between. Each call of the merged one returns the whole cache, of optimum's the first."""
    source = make_family_model(name, tmp_path / "model")
    folder = export(source, packaging=("transformers_js", "optimum"), **params).folder
    given = padded_source(name)
    wanted = steps_of_two_files(folder, given, start=1, steps=10)
    graphs = [
        folder / "transformers_js" / "onnx" / f"{part}.onnx" for part in ("encoder_model", "decoder_model_merged")
    ]
    merged = steps_of_merged(*graphs, given, start=1, steps=10)
    three = steps_of_three_files(folder / "optimum", given, start=1, steps=10)
    for found in (merged, three):
        np.testing.assert_allclose(
            np.stack([each[:, 0] for each in found]), np.stack([each[:, 0] for each in wanted]), atol=1e-5
        )
    assert {path.name for path in (folder / "optimum").glob("*.onnx")} == {
        "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx",
    }  # fmt: skip
    for data in (folder / "optimum").glob("*.data"):
        assert data.samefile(folder / data.name)

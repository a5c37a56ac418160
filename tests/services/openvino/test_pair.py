"""An encoder and its decoder: the files and names that OpenVINO's tools know, sources that are computed once, and graphs that cannot be divided."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from slipway.errors import OpenVinoExportError
from slipway.proof.runtime import Source, Step, Unusable
from slipway.stage import Context
from slipway_openvino.library import ov
from slipway_openvino.params import DECODER_MODEL, ENCODER_MODEL
from slipway_openvino.runtime import EXACT, load
from slipway_quantize.stage import STAGE as QUANTIZE
from support.models.judged_families import make
from support.models.openvino_models import converted, exported

pytestmark = pytest.mark.slow  # the graphs of a pair take half a minute
SOURCE = Source(np.array([[5, 9, 12, 30]]), np.ones((1, 4), np.int64))


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graphs of a small Marian."""
    root = tmp_path_factory.mktemp("translator")
    return exported(make("marian", root / "model").base, root / "export")


@pytest.fixture(scope="module")
def pair(translator: Path) -> Path:
    return converted(translator, translator.parent / "pair")[0]


def step_of(tokens: list[int], past: object = None, *, before: int = 0) -> Step:
    ids = np.array([tokens])
    return Step(ids, np.ones((1, before + len(tokens)), np.int64), before + np.arange(ids.shape[1])[None], past, SOURCE)


def test_the_folder_has_the_files_and_names_that_other_programs_expect(pair: Path) -> None:
    record = json.loads((pair / "openvino_export.json").read_text())
    assert record["models"] == {
        ENCODER_MODEL: {"inputs": ["input_ids", "attention_mask"], "outputs": ["last_hidden_state"], "stateful": False},
        DECODER_MODEL: {
            "inputs": ["input_ids", "encoder_attention_mask", "beam_idx", "encoder_hidden_states"],
            "outputs": ["logits"],
            "stateful": True,
        },
    }
    assert not (pair / "openvino_model.xml").exists()
    assert not (pair / "openvino_tokenizer.xml").exists()
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {path.name for path in pair.iterdir()}


def test_keys_and_values_of_the_source_are_computed_once(pair: Path) -> None:
    """What the decoder is given in later calls is not read, and a reset forgets it."""
    request = ov.Core().compile_model(pair / DECODER_MODEL, "CPU", dict(EXACT)).create_infer_request()
    encoded = np.random.default_rng(2).standard_normal((1, 4, 32)).astype(np.float32)
    given = {"encoder_attention_mask": SOURCE.mask, "beam_idx": np.zeros(1, np.int32)}

    def logits(*calls: tuple[int, np.ndarray]) -> np.ndarray:
        request.reset_state()
        for token, values in calls:
            request.infer({"input_ids": np.array([[token]]), "encoder_hidden_states": values, **given})
        return np.array(request.get_tensor("logits").data)

    wanted = logits((1, encoded), (7, encoded))
    assert np.array_equal(logits((1, encoded), (7, np.zeros_like(encoded))), wanted)
    assert not np.allclose(logits((1, np.zeros_like(encoded)), (7, encoded)), wanted)


def test_a_beam_takes_the_words_of_another(pair: Path) -> None:
    """As a search by beams does: rows of one source continue others."""
    request = ov.Core().compile_model(pair / DECODER_MODEL, "CPU", dict(EXACT)).create_infer_request()
    encoded = np.repeat(np.random.default_rng(2).standard_normal((1, 4, 32)).astype(np.float32), 2, axis=0)
    given = {"encoder_attention_mask": np.ones((2, 4), np.int64), "encoder_hidden_states": encoded}

    def run(tokens: list[list[int]], rows: list[int]) -> np.ndarray:
        request.infer({"input_ids": np.array(tokens), "beam_idx": np.array(rows, np.int32), **given})
        return np.array(request.get_tensor("logits").data)

    run([[1, 8], [1, 20]], [0, 1])
    found = run([[30], [31]], [1, 1])
    request.reset_state()
    run([[1, 20], [1, 20]], [0, 1])
    assert np.allclose(run([[30], [31]], [0, 1]), found, atol=1e-6)


def test_a_past_is_good_for_the_next_call_only(pair: Path) -> None:
    model = load(pair, threads=1)
    _, past = model.forward(step_of([1, 8]))
    model.forward(step_of([1, 20]))
    with pytest.raises(Unusable, match="overwritten"):
        model.forward(step_of([30], past, before=2))


def test_integers_are_those_of_the_graphs(translator: Path, tmp_path: Path) -> None:
    """Also those of the cross-attention, which move from one model to the other, and of the embedding that both share."""
    work = tmp_path / "quantize"
    work.mkdir()
    asked = QUANTIZE.params(format="onnx", level="int8", accuracy_level=1, check=False)  # products in float32
    rounded = QUANTIZE.run({"model": translator}, asked, Context(workdir=work))["model"]
    folder, _ = converted(rounded, tmp_path / "work", level="int8")
    kinds = {
        node.get_output_element_type(0).get_type_name()
        for file in (ENCODER_MODEL, DECODER_MODEL)
        for node in ov.Core().read_model(folder / file).get_ops()
        if node.get_type_name() == "Constant"
    }
    assert "i8" in kinds
    assert not {"u8", "u4"} & kinds
    exact, whole = (load(each, threads=1) for each in (folder, converted(translator, tmp_path / "whole")[0]))
    for model in (exact, whole):
        model.prepare_comparison()
    found, wanted = (model.forward(step_of([1, 8, 20]))[0] for model in (exact, whole))
    assert 0 < abs(found - wanted).max() < 0.2


def test_two_conversions_have_the_same_bytes(translator: Path, pair: Path, tmp_path: Path) -> None:
    again, _ = converted(translator, tmp_path / "work")
    names = sorted(path.name for path in pair.iterdir())
    assert [(again / name).read_bytes() for name in names] == [(pair / name).read_bytes() for name in names]


def test_a_folder_without_a_decoder_is_refused(translator: Path, tmp_path: Path) -> None:
    shutil.copytree(translator, tmp_path / "graph", ignore=shutil.ignore_patterns("decoder_model.onnx"))
    with pytest.raises(OpenVinoExportError, match=r"no decoder_model\.onnx") as caught:
        converted(tmp_path / "graph", tmp_path / "work")
    assert caught.value.reason == "ONNX_INVALID"


def test_an_encoder_without_keys_of_its_source_is_refused(translator: Path, tmp_path: Path) -> None:
    shutil.copytree(translator, tmp_path / "graph")
    model = onnx.load(tmp_path / "graph" / "encoder_model.onnx", load_external_data=False)
    kept = [output for output in model.graph.output if output.name != "present.1.encoder.key"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, tmp_path / "graph" / "encoder_model.onnx")
    with pytest.raises(OpenVinoExportError, match=r"an encoder .encoder-decoder.: missing \['present.1.encoder.key'\]"):
        converted(tmp_path / "graph", tmp_path / "work")


def test_keys_that_follow_from_the_text_itself_are_refused(translator: Path, tmp_path: Path) -> None:
    """The decoder is given what the encoder computed, not its text."""
    shutil.copytree(translator, tmp_path / "graph")
    model = onnx.load(tmp_path / "graph" / "encoder_model.onnx", load_external_data=False)
    graph = model.graph
    (last,) = (node for node in graph.node if "present.0.encoder.key" in node.output)
    last.output[:] = ["of_the_encoded"]
    graph.node.extend(
        [
            helper.make_node("Cast", ["input_ids"], ["as_numbers"], to=onnx.TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["as_numbers"], ["sum"], keepdims=0),
            helper.make_node("Add", ["of_the_encoded", "sum"], ["present.0.encoder.key"]),
        ]
    )
    onnx.save(model, tmp_path / "graph" / "encoder_model.onnx")
    with pytest.raises(OpenVinoExportError, match="do not follow from what") as caught:
        converted(tmp_path / "graph", tmp_path / "work")
    assert caught.value.reason == "OPENVINO_CONVERSION_FAILED"

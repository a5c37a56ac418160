"""Models in the form TensorRT parses, text for their levels, and the stages run in work folders of their own."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import TensorRTBuildError
from slipway.stage import Context
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.stage import STAGE as EXPORT
from slipway_quantize.params import QuantizeParams
from slipway_quantize.stage import STAGE as QUANTIZE
from slipway_tensorrt_build.kept import Skeleton, mark_refittable, skeleton_of
from slipway_tensorrt_build.params import TensorRTBuildParams
from slipway_tensorrt_build.stage import STAGE
from support.models.calibrated_models import write_data
from support.models.family_models import make_family_model
from support.models.quantize_models import save_tiny
from support.models.tiny_models import WORDS, save_tokenizer


def exported(model: Path, workdir: Path, **params: Any) -> Path:
    """The model's graph for TensorRT."""
    workdir.mkdir(exist_ok=True)
    chosen = OnnxExportParams(runtime="tensorrt", **{"parity": "never", **params})
    return EXPORT.run({"pytorch": model}, chosen, Context(workdir=workdir))["onnx"]


def assert_every_weight_is_known(graph: Path) -> None:
    """Check that a network that TensorRT parses knows each weight by the graph's name, and says which one it does not know."""
    import tensorrt_rtx as trt

    skeleton = skeleton_of(graph / "model.onnx")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    assert trt.OnnxParser(network, logger).parse_from_file(str(graph / "model.onnx"))
    mark_refittable(network, skeleton)
    assert all(network.are_weights_marked_refittable(weight) for weight in skeleton.weights)
    with pytest.raises(TensorRTBuildError, match="does not know the weight 'lost'"):
        mark_refittable(network, Skeleton("", {"lost": ("FLOAT", 4)}))


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 of standard operators, opset 20, float32."""
    folder = tmp_path_factory.mktemp("decoder")
    graph = exported(save_tiny(folder / "source"), folder)
    (graph / "tokenizer.json").write_text('{"version": "1.0"}')
    (graph / "additional_chat_templates").mkdir()
    (graph / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return graph


class Graphs(dict[str, Path]):
    """Graphs with a tokenizer, each made when it is first asked for: a decoder that is built, the same traced, and a classifier (BERT)."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        if name == "classifier":
            found = exported(make_family_model("bert-classes", folder / "bert"), folder / "graph", parity="always")
        else:
            source = save_tiny(folder / "qwen3")
            save_tokenizer(source)
            found = exported(source, folder / "graph", **({"engine": "dynamo"} if name == "traced decoder" else {}))
        self[name] = found
        return found


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen texts of random words."""
    draw = random.Random(4)
    texts = [" ".join(draw.choices(WORDS, k=400)) for _ in range(16)]
    return write_data(tmp_path_factory.mktemp("text") / "data", texts)


@pytest.fixture
def quantize(tmp_path: Path) -> Callable[..., tuple[Path, Context]]:
    """Runs the quantize stage for this format in a work folder of its own."""
    runs = iter(range(100))

    def call(source: Path, data: Path | None = None, **params: Any) -> tuple[Path, Context]:
        workdir = tmp_path / f"level-{next(runs)}"
        workdir.mkdir()
        ctx = Context(workdir=workdir, log=logging.getLogger("test"))
        inputs = {"model": source} | ({"data": data} if data else {})
        return QUANTIZE.run(inputs, QuantizeParams(**{"format": "tensorrt", **params}), ctx)["model"], ctx

    return call


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., tuple[Path, Context]]:
    runs = iter(range(100))

    def call(source: Path, **params: Any) -> tuple[Path, Context]:
        gc.collect()  # TensorRT warns while an earlier builder is there, and each test has a log of its own
        workdir = tmp_path / f"engine-{next(runs)}"
        workdir.mkdir()
        ctx = Context(workdir=workdir, log=logging.getLogger("test"))
        return STAGE.run({"onnx": source}, TensorRTBuildParams(**params), ctx)["tensorrt"], ctx

    return call

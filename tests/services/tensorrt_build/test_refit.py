"""Refitting: graphs are compared for real, and weights marked in real networks; an engine, which needs a GPU, has a stand-in."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from slipway.configuration.loading import parse
from slipway.errors import ConfigurationError, TensorRTBuildError
from slipway.machine.processors import Gpu
from slipway.planning.plan import plan
from slipway.stage import Context
from slipway_tensorrt_build.builders import Choice, Machine, choose
from slipway_tensorrt_build.format import builders
from slipway_tensorrt_build.kept import Refittable, Skeleton, skeleton_of, weights_difference
from slipway_tensorrt_build.params import TensorRTBuildParams
from support.models.quantize_models import save_tiny

from .conftest import assert_every_weight_is_known, exported

Quantize = Callable[..., tuple[Path, Context]]
ADA = Gpu("NVIDIA L4", "sm89")


@pytest.fixture(scope="session")
def merges(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Graphs of two merges of one base, and of a base with wider layers."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("merges")
    model = AutoModelForCausalLM.from_pretrained(save_tiny(folder / "base"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight += 0.01
            layer.self_attn.q_proj.weight *= 1.5
    model.save_pretrained(folder / "other")
    return {
        "one": decoder,
        "other": exported(folder / "other", folder / "graph-other"),
        "wide": exported(save_tiny(folder / "wide", intermediate_size=192), folder / "graph-wide"),
    }


def test_two_merges_have_one_skeleton(merges: dict[str, Path]) -> None:
    one, other, wide = (skeleton_of(merges[name] / "model.onnx") for name in ("one", "other", "wide"))
    data = [(merges[name] / "model.onnx.data").read_bytes() for name in ("one", "other")]
    assert data[0] != data[1]
    assert one == other
    assert one.digest != wide.digest
    assert one.weights["model.layers.0.mlp.down_proj.weight.T"] == ("FLOAT", 128 * 64)


def test_a_small_constant_is_part_of_the_graph(merges: dict[str, Path], tmp_path: Path) -> None:
    """Such as the epsilon of a norm, or the scale of attention: an engine may have it in its kernels."""
    model = onnx.load(merges["one"] / "model.onnx", load_external_data=False)
    scalar = next(
        each for each in model.graph.initializer if not each.dims and each.data_type == onnx.TensorProto.FLOAT
    )
    scalar.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scalar) * 2, scalar.name))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert skeleton_of(tmp_path / "model.onnx").digest != skeleton_of(merges["one"] / "model.onnx").digest


@pytest.mark.parametrize("level", ["", pytest.param("fp16", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("name", ["decoder", "classifier"])
def test_a_network_knows_every_weight_by_the_graph_s_name(
    graphs: dict[str, Path], quantize: Quantize, name: str, level: str
) -> None:
    """Those of a traced decoder are looked up where its engine is built, among the levels."""
    pytest.importorskip("tensorrt_rtx")
    folder = quantize(graphs[name], level=level)[0] if level else graphs[name]
    types = {dtype for dtype, _ in skeleton_of(folder / "model.onnx").weights.values()}
    assert types >= {{"": "FLOAT", "fp16": "HALF", "bf16": "BF16"}[level]}
    assert_every_weight_is_known(folder)


@dataclass
class Engine:
    """An engine: its weights, and whether the last refit went through."""

    weights: dict[str, tuple[str, int]]
    source: str = "built"

    def serialize(self) -> bytes:
        return self.source.encode()


@dataclass
class Library:
    """What TensorRT does with an engine's weights, as its documentation has it."""

    engine: Engine | None
    forgets: list[str] = field(default_factory=list)
    refuses: bool = False

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        return SimpleNamespace(deserialize_cuda_engine=lambda plan: self.engine if plan else None)

    def Refitter(self, engine: Engine, logger: Any) -> Any:  # noqa: N802
        def apply() -> bool:
            engine.source = f"refitted with {self.given}"
            return not self.refuses

        def prototype(name: str) -> Any:
            dtype, size = engine.weights[name]
            return SimpleNamespace(dtype=SimpleNamespace(name=dtype), size=size)

        return SimpleNamespace(
            get_all_weights=lambda: list(engine.weights),
            get_weights_prototype=prototype,
            get_missing_weights=lambda: self.forgets,
            refit_cuda_engine=apply,
        )

    def OnnxParserRefitter(self, refitter: Any, logger: Any) -> Any:  # noqa: N802
        def read(path: str) -> bool:
            self.given = Path(path).parent.parent.name
            return True

        return SimpleNamespace(refit_from_file=read, num_errors=0)


OF = {"gpu": "sm89"}


def refittable(graph: Path, kept: Path | None, **of: str) -> Refittable:
    ctx = Context(workdir=Path("unused"), kept=kept, log=logging.getLogger("test"))
    return Refittable(skeleton_of(graph / "model.onnx"), {**OF, **of}, graph=graph / "model.onnx", ctx=ctx)


def keep(graph: Path, kept: Path, **of: str) -> Path:
    engine = kept.parent / "model.sm89.engine"
    engine.write_bytes(b"plan")
    refittable(graph, kept, **of).keep(engine, hashlib.sha256(b"plan").hexdigest())
    engine.unlink()
    return kept


def taken(graph: Path, kept: Path | None, library: Library, **of: str) -> bytes | None:
    return refittable(graph, kept, **of).refit(library, None, [])


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


def weights(graph: Path) -> dict[str, tuple[str, int]]:
    return dict(skeleton_of(graph / "model.onnx").weights)


def test_another_merge_takes_the_kept_engine(merges: dict[str, Path], kept: Path) -> None:
    keep(merges["one"], kept)
    found = taken(merges["other"], kept, Library(Engine(weights(merges["one"]))))
    assert found is not None
    assert found.startswith(b"refitted with ")


@pytest.mark.parametrize("change", ["graph", "gpu", "empty", "damaged", "nothing kept"])
def test_no_other_engine_is_taken(merges: dict[str, Path], kept: Path, change: str) -> None:
    if change != "empty":
        keep(merges["one"], kept)
    if change == "damaged":
        [path] = kept.iterdir()
        path.write_bytes(b"other")
    graph = merges["wide" if change == "graph" else "other"]
    of = {"gpu": "sm90"} if change == "gpu" else {}
    place = None if change == "nothing kept" else kept
    assert taken(graph, place, Library(Engine(weights(merges["one"]))), **of) is None


@pytest.mark.parametrize(
    ("library", "told"),
    [
        (Library(None), "it does not load"),
        (Library(Engine({}), forgets=["w"]), "has no weight"),
        (Library(Engine({}), refuses=True), "has no weight"),
    ],
)
def test_what_tensorrt_refuses_is_built(
    merges: dict[str, Path], kept: Path, library: Library, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep(merges["one"], kept)
    with caplog.at_level(logging.INFO, logger="test"):
        assert taken(merges["other"], kept, library) is None
    assert told in caplog.text


@pytest.mark.parametrize(
    ("changes", "told"), [({"forgets": ["w"]}, "'w' got no values"), ({"refuses": True}, "refuses the weights")]
)
def test_an_engine_that_is_not_whole_is_never_used(
    merges: dict[str, Path], kept: Path, changes: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep(merges["one"], kept)
    with caplog.at_level(logging.INFO, logger="test"):
        assert taken(merges["other"], kept, Library(Engine(weights(merges["one"])), **changes)) is None
    assert told in caplog.text


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"a": ("FLOAT", 4), "b": ("FLOAT", 2)}, ""),
        ({"a": ("FLOAT", 4)}, "it has no weight 'b'"),
        ({"a": ("FLOAT", 4), "b": ("FLOAT", 2), "c": ("FLOAT", 2)}, "the graph has no weight 'c'"),
        ({"a": ("HALF", 4), "b": ("FLOAT", 2)}, "'a' has 4 values of HALF, and the graph's 4 of FLOAT"),
        ({"a": ("FLOAT", 4), "b": ("FLOAT", 3)}, "'b' has 3 values of FLOAT, and the graph's 2 of FLOAT"),
    ],
)
def test_names_types_and_sizes_are_compared(found: dict[str, tuple[str, int]], told: str) -> None:
    skeleton = Skeleton("", {"a": ("FLOAT", 4), "b": ("FLOAT", 2)})
    said = weights_difference(skeleton, Library(None).Refitter(Engine(found), None))
    assert said == told or (told and told in said)


def test_few_engines_are_kept(merges: dict[str, Path], kept: Path) -> None:
    for number in range(6):
        keep(merges["one"], kept, profile=str(number))
    keep(merges["other"], kept, profile="5")  # in the place of the other merge's
    assert len(list(kept.iterdir())) == 4
    assert taken(merges["other"], kept, Library(Engine(weights(merges["one"]))), profile="5")


def test_refitting_needs_the_gpu() -> None:
    here = Machine(gpus=(ADA,), tensorrt="", tensorrt_rtx="1.7")
    assert choose(TensorRTBuildParams(refit=True, targets=("sm89",)), here) == Choice("tensorrt_rtx", "1.7", ("sm89",))
    for machine, target in ((here, "sm120"), (Machine((), "", "1.7"), "sm89")):
        with pytest.raises(TensorRTBuildError, match=f"{target} is not here") as caught:
            choose(TensorRTBuildParams(refit=True, targets=(target,)), machine)
        assert caught.value.reason == "UNSUPPORTED"
    assert all(need.gpu and need.gpu_architectures == ("sm89",) for need in builders("auto", ("sm89",), refit=True))


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"targets": ["sm89", "sm120"]}, "only an engine for the worker's own GPU can be refitted"),
        ({"targets": ["sm89"], "quantization": ["int8_static"]}, "ranges of activations belong to one merge"),
    ],
)
def test_what_cannot_be_refitted_is_refused_before_anything_runs(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parse({"formats": {"tensorrt": {"enabled": True, "refit": True, **section}}})


def test_the_stage_is_told() -> None:
    configuration = parse({"formats": {"tensorrt": {"enabled": True, "refit": True, "quantization": ["fp16"]}}})
    tasks = {task.id: task for task in plan(configuration, ("base", "adapter"))}
    assert tasks["tensorrt_build"].params["refit"]
    assert tasks["tensorrt_build-fp16"].params["refit"]

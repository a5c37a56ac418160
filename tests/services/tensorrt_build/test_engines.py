"""Engines really built ahead of time by TensorRT-RTX, and what it says when it cannot."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from slipway.errors import FormatExportError, ModelExportError, StageError
from slipway.stage import Context, Progress
from slipway_tensorrt_build.build import build_engine, make_builder, make_config, make_logger
from slipway_tensorrt_build.builders import Choice
from slipway_tensorrt_build.params import Range, TensorRTBuildParams
from slipway_tensorrt_build.stage import STAGE
from support.models.engine_plans import assert_same_plan

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is made for x86-64 Linux and Windows")

Build = Callable[..., tuple[Path, Context]]


def test_one_engine_per_target_and_its_description(build: Build, decoder: Path) -> None:
    folder, ctx = build(
        decoder,
        targets=("sm89", "sm120"),
        batch=Range(min=1, opt=2, max=3),
        sequence=Range(min=1, opt=16, max=32),
        past=Range(min=0, opt=64, max=128),
    )
    described = json.loads((folder / "engine.json").read_text())
    assert [engine["target"] for engine in described["engines"]] == ["sm89", "sm120"]
    for engine in described["engines"]:
        data = (folder / engine["file"]).read_bytes()
        assert (engine["size_bytes"], engine["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        # At least the weights: 2 layers of float32.
        assert len(data) > (decoder / "model.onnx.data").stat().st_size
    contents = {(folder / f"model.{target}.engine").read_bytes() for target in ("sm89", "sm120")}
    assert len(contents) == 2
    assert described["builder"] == "tensorrt_rtx"
    assert described["gpu"] is None
    assert described["builder_version"] == ctx.facts["builder_version"]
    (profile,) = described["profiles"]
    assert profile["input_ids"] == {"min": [1, 1], "opt": [2, 16], "max": [3, 32]}
    assert profile["attention_mask"] == {"min": [1, 1], "opt": [2, 80], "max": [3, 160]}
    assert profile["past_key_values.1.value"] == {"min": [1, 2, 0, 32], "opt": [2, 2, 64, 32], "max": [3, 2, 128, 32]}
    inputs = {value["name"]: (value["dtype"], value["shape"]) for value in described["inputs"]}
    assert inputs["input_ids"] == ("int64", [-1, -1])
    assert inputs["past_key_values.0.key"] == ("float", [-1, 2, -1, 32])
    outputs = {value["name"]: value["shape"] for value in described["outputs"]}
    assert outputs["logits"] == [-1, -1, 512]
    graph = hashlib.sha256((decoder / "model.onnx").read_bytes()).hexdigest()
    assert described["onnx"]["model.onnx"] == graph
    assert sorted(described["onnx"]) == ["model.onnx", "model.onnx.data"]


def test_two_builds_are_equal_but_for_the_numbers_of_sizes(decoder: Path, tmp_path: Path) -> None:
    one, other = (plan_of(decoder, tmp_path / name) for name in ("one", "other"))
    if len(one) != len(other):  # now and then a build is some KB shorter than the next; see the service's README
        third = plan_of(decoder, tmp_path / "third")
        one, [other] = third, [plan for plan in (one, other) if len(plan) == len(third)]
    assert_same_plan(one, other)


@pytest.mark.slow
def test_comparison_finds_what_is_no_numbering(decoder: Path, tmp_path: Path) -> None:
    one = plan_of(decoder, tmp_path / "one")
    shutil.copytree(decoder, tmp_path / "changed")
    weights = bytearray((decoder / "model.onnx.data").read_bytes())
    weights[len(weights) // 2] ^= 1
    (tmp_path / "changed" / "model.onnx.data").write_bytes(weights)
    # Now and then a build is some KB shorter than the next; then its length alone tells them apart.
    builds = (plan_of(tmp_path / "changed", tmp_path / f"other-{number}") for number in range(5))
    others = {"the weights differ": next(plan for plan in builds if len(plan) == len(one))}
    for text, told in ((b"__forceinline__ __device__", "the kernels differ"), (b"position_ids", "the names differ")):
        damaged = bytearray(one)
        damaged[one.index(text)] ^= 1
        others[told] = bytes(damaged)
    for told, other in others.items():
        with pytest.raises(AssertionError, match=told):
            assert_same_plan(one, other)


def plan_of(source: Path, workdir: Path) -> bytes:
    """The engine the stage builds for sm89 in an attempt of its own."""
    workdir.mkdir()
    folder = STAGE.run({"onnx": source}, TensorRTBuildParams(targets=("sm89",)), Context(workdir=workdir))["tensorrt"]
    return (folder / "model.sm89.engine").read_bytes()


def test_folder_is_complete_without_the_onnx_model(build: Build, decoder: Path) -> None:
    folder, _ = build(decoder, targets=("sm89",))
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == [
        "additional_chat_templates/tools.jinja", "config.json", "engine.json", "generation_config.json",
        "model.sm89.engine", "tokenizer.json",
    ]  # fmt: skip
    assert (folder / "config.json").read_bytes() == (decoder / "config.json").read_bytes()


def test_profile_stays_within_the_positions_the_model_has(build: Build, decoder: Path) -> None:
    folder, ctx = build(decoder, targets=("sm89",))  # the tiny model has 256 positions, the defaults ask for 2560
    (profile,) = json.loads((folder / "engine.json").read_text())["profiles"]
    assert profile["input_ids"]["max"] == [4, 256]
    assert profile["past_key_values.0.key"]["max"] == [4, 2, 255, 32]
    assert profile["attention_mask"]["max"] == [4, 511]
    # No other: TensorRT warns where the three do not belong together.
    assert ctx.facts["warnings"] == [
        "the model has 256 positions: sequence.max of 512 becomes 256, past.opt of 512 becomes 255, past.max of 2048 becomes 255"
    ]


def test_input_with_a_second_hard_link_is_fine(build: Build, decoder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in (path for path in decoder.iterdir() if path.is_file()):
        os.link(path, linked / path.name)
    folder, _ = build(linked, targets=("sm89",))
    assert (folder / "model.sm89.engine").is_file()


def test_parser_errors_name_node_and_operator(build: Build, decoder: Path, tmp_path: Path) -> None:
    model = onnx.load(decoder / "model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Sigmoid")
    node.domain, node.op_type, node.name = "com.microsoft", "QuickGelu", "the-culprit"
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in (path for path in decoder.iterdir() if path.is_file()):
        os.link(path, broken / path.name)
    (broken / "model.onnx").unlink()
    (broken / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FormatExportError) as caught:
        build(broken, targets=("sm89",))
    assert caught.value.reason == "TENSORRT_PARSE_FAILED"
    assert caught.value.about == {"operators": "QuickGelu", "nodes": "the-culprit"}
    assert "QuickGelu" in caught.value.message


def test_architecture_without_kernels_carries_the_builders_words(build: Build, decoder: Path) -> None:
    with pytest.raises(FormatExportError) as caught:
        build(decoder, targets=("sm75",))  # Turing has no float32 matrix product in TensorRT-RTX
    assert caught.value.reason == "TENSORRT_BUILD_FAILED"
    assert "FP32 GEMM" in caught.value.message
    assert caught.value.about == {"target": "sm75"}


@pytest.mark.parametrize("damage", ["graph", "missing", "config"])
def test_damaged_input_has_its_reason(build: Build, decoder: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in (path for path in decoder.iterdir() if path.is_file()):
        (folder / path.name).write_bytes(path.read_bytes())
    match damage:
        case "graph":
            (folder / "model.onnx").write_bytes(b"no graph")
        case "missing":
            (folder / "model.onnx").unlink()
        case "config":
            (folder / "config.json").unlink()
    with pytest.raises(ModelExportError) as caught:
        build(folder, targets=("sm89",))
    assert caught.value.reason == ("TENSORRT_PARSE_FAILED" if damage == "graph" else "ONNX_INVALID")


def test_progress_is_reported_and_cancellation_ends_the_build(decoder: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []

    def cancel_inside(progress: Progress) -> None:
        seen.append(progress)
        if progress.phase == "build sm89" and progress.done == 2:
            ctx.cancelled.set()

    ctx = Context(workdir=tmp_path, log=logging.getLogger("test"), on_progress=cancel_inside)
    with pytest.raises(StageError) as caught:
        STAGE.run({"onnx": decoder}, TensorRTBuildParams(targets=("sm89",)), ctx)
    assert caught.value.reason == "CANCELLED"
    assert [progress.phase for progress in seen] == ["parse", "build sm89", "build sm89"]
    assert not (tmp_path / "tensorrt" / "model.sm89.engine").exists()


@pytest.mark.parametrize(
    ("logged", "reason"),
    [
        (["Error Code 1: Cuda Runtime (out of memory)", "Could not find any implementation for node {x}."], "GPU_OUT_OF_MEMORY"),
        (["Could not find any implementation for node {x}."], "TENSORRT_BUILD_FAILED"),
    ],
)  # fmt: skip
def test_a_gpu_without_room_is_told_from_a_graph_without_kernels(
    tmp_path: Path, logged: list[str], reason: str
) -> None:
    """The builder, which needs the GPU for the first, is replaced by one that logs and returns the same."""
    errors: list[str] = []
    builder = SimpleNamespace(build_serialized_network=lambda *_: errors.extend(logged))
    with pytest.raises(FormatExportError) as caught:
        build_engine(builder, None, None, tmp_path / "x", name="sm90", errors=errors, ctx=Context(workdir=tmp_path))
    assert (caught.value.reason, caught.value.about) == (reason, {"target": "sm90"})
    assert logged[0] in caught.value.message
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("code", "reason", "helps"), [(2, "GPU_OUT_OF_MEMORY", "end other programs"), (35, "UNSUPPORTED", "driver")]
)
def test_a_builder_that_does_not_start_says_why(code: int, reason: str, helps: str) -> None:
    """TensorRT's own exception says only that a factory function returned nothing; its log has the number of CUDA's error."""
    errors: list[str] = []

    def start(_: object) -> None:
        errors.append(f"CUDA initialization failure with error: {code}.\nPlease check your CUDA installation")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    with pytest.raises(FormatExportError, match=f"error: {code}. Please") as caught:
        make_builder(SimpleNamespace(Builder=start), None, errors)
    assert caught.value.reason == reason
    assert helps in caught.value.remedy


def test_an_engine_is_built_within_a_workspace() -> None:
    import tensorrt_rtx as trt

    builder, choice = trt.Builder(trt.Logger(trt.Logger.ERROR)), Choice("tensorrt_rtx", "1.7", ("sm89",))
    found = {}
    for allowed in (0, 1 << 30):
        config = make_config(trt, builder, choice, "sm89", params=TensorRTBuildParams(workspace_bytes=allowed))
        found[allowed] = config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
    assert found[1 << 30] == 1 << 30 != found[0]


def test_builder_log_reaches_the_attempts_log(build: Build, decoder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="test"):
        build(decoder, targets=("sm89",))
    assert any("Int64 binding" in record.message for record in caplog.records if record.levelno == logging.INFO)


def test_what_the_builder_warns_of_reaches_the_user_once(tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    ctx, errors = Context(workdir=tmp_path), list[str]()
    logger = make_logger(trt, ctx, errors)
    for _ in range(2):
        logger.log(trt.ILogger.Severity.WARNING, "Profile kMAX values are not self-consistent.\n")
    logger.log(trt.ILogger.Severity.WARNING, "Make sure input input_ids has Int64 binding.")
    logger.log(trt.ILogger.Severity.ERROR, "no kernel")
    assert ctx.facts["warnings"] == ["TensorRT: Profile kMAX values are not self-consistent."]
    assert errors == ["no kernel"]

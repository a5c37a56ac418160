"""The checks before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slipway.formats import PlannedTask
from slipway.planning.preflight import Verdict, preflight
from slipway.sizes import format_size
from slipway_onnx_export.params import BEST_OPSET, ENGINE_OPSETS, describe_replaced_opset


def planned(
    task: str,
    stage: str,
    params: Mapping[str, Any] | None = None,
    format: str = "",  # noqa: A002 - as the task names it
    *,
    fallback: str = "",
    inputs: Mapping[str, str] | None = None,
) -> PlannedTask:
    return PlannedTask(task, stage, params or {}, inputs or {}, format, fallback=fallback)


PLAN = (
    planned("merge", "merge", format="pytorch"),
    planned("int4", "quantize", {"level": "int4", "format": "pytorch"}, "pytorch-int4"),
    planned("onnx_export", "onnx_export", format="onnx"),
    planned("validate", "validate"),
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file({"a": np.zeros((100, 10), np.float16), "b": np.zeros(24, np.float16)}, folder / "model.safetensors")
    return folder


def test_sizes_follow_from_the_number_of_weights(base: Path, tmp_path: Path) -> None:
    checked = preflight(PLAN, base=base, home=tmp_path / "home", output=tmp_path / "out")
    graph = 2 << 20
    assert checked.task_bytes == {"merge": 2048, "int4": 768 + 2000, "onnx_export": 4096 + graph, "validate": 0}
    assert checked.disk_needed_bytes == 2048 + 768 + 2000 + 4096 + graph
    assert checked.error() is None
    assert not (tmp_path / "home").exists()


def test_packages_count_for_each_output_that_gets_them(base: Path, tmp_path: Path) -> None:
    """Their weights are second names of the graphs' files, so only nodes, companions and copied projections do."""
    from slipway_onnx_export.format import OnnxConfiguration

    (base / "tokenizer.json").write_bytes(b" " * 5000)
    plan = [
        planned("onnx", "onnx_export", format="onnx"),
        planned("int4", "quantize", {"level": "int4", "format": "onnx"}, "onnx-int4"),
    ]

    def sizes(*kinds: str) -> dict[str, int]:
        section = OnnxConfiguration.model_validate({"packaging": kinds})
        checked = preflight(
            plan, base=base, sections={"onnx": section}, home=tmp_path / "home", output=tmp_path / "out", here=False
        )
        assert checked.disk_needed_bytes == sum((checked.task_bytes or {}).values())
        return checked.task_bytes or {}

    bare, packed = sizes(), sizes("optimum")
    assert bare == preflight(plan, base=base, home=tmp_path, output=tmp_path, here=False).task_bytes
    assert packed["onnx"] - bare["onnx"] == packed["int4"] - bare["int4"] > 5000
    assert sizes("triton", "kserve")["int4"] - sizes("triton")["int4"] < 1 << 20  # KServe runs the same folder
    assert sizes("transformers_js", "optimum")["int4"] > sizes("transformers_js")["int4"] > packed["int4"]


@pytest.mark.parametrize(("opset", "instead"), [(11, "opset 14"), (13, "opset 14"), (25, "opset 23"), (26, "opset 23")])
def test_an_opset_that_no_engine_writes_is_said_with_what_comes_instead(
    base: Path, tmp_path: Path, opset: int, instead: str
) -> None:
    plan = [planned("onnx_export", "onnx_export", {"opset": opset}, "onnx")]
    checked = preflight(plan, base=base, home=tmp_path / "home", output=tmp_path / "out", here=False)
    (finding,) = [finding for finding in checked.findings if finding.check == "opset"]
    assert finding.verdict is Verdict.WARNING
    assert f"formats.onnx.opset_version is {opset}" in finding.message
    assert instead in finding.message
    assert checked.error() is None


@pytest.mark.parametrize("opset", [None, 14, 18, 23, 24])
def test_an_opset_that_an_engine_writes_needs_no_word(base: Path, tmp_path: Path, opset: int | None) -> None:
    plan = [planned("onnx_export", "onnx_export", {"opset": opset}, "onnx")]
    checked = preflight(plan, base=base, home=tmp_path / "home", output=tmp_path / "out", here=False)
    assert [finding for finding in checked.findings if finding.check == "opset"] == []


@pytest.mark.parametrize("opset", [7, 13, 25, 26])
def test_recovery_leads_to_the_opset_that_is_announced(opset: int) -> None:
    """If every engine fails, the recovery table ends with the opset that the plan named."""
    from slipway.errors import Failure
    from slipway_coordinator.lifecycle.records import AttemptRecord, TaskState
    from slipway_coordinator.lifecycle.recovery import recover
    from slipway_coordinator.lifecycle.rules import Profile

    params: dict[str, Any] = {"engine": "auto", "opset": opset}
    history = [AttemptRecord(number=1, state=TaskState.FAILED, params=params)]
    while params["opset"] is not None and params["opset"] not in ENGINE_OPSETS[_engine(params)]:
        found = recover(
            Failure("OPSET_UNSUPPORTED", "it cannot", about={"engine": _engine(params)}),
            "onnx_export",
            params=params,
            history=history,
            profile=Profile.BALANCED,
            facts={},
            max_attempts=5,
        )
        assert found is not None
        params = found.params
        history.append(AttemptRecord(number=len(history) + 1, state=TaskState.FAILED, params=params, rule=found.rule))
    assert f"opset {params['opset'] or BEST_OPSET}" in describe_replaced_opset(opset)


def _engine(params: dict[str, Any]) -> str:
    """The engine of an attempt at a decoder."""
    return "mobius" if params["engine"] == "auto" else str(params["engine"])


@pytest.mark.parametrize(("name", "copies"), [("onnx", 2), ("openvino", 2)])
def test_weights_that_delivery_copies_take_their_space_twice(
    base: Path, tmp_path: Path, name: str, copies: int
) -> None:
    task = planned(name, "onnx_export", format=name)
    checked = preflight([task], base=base, home=tmp_path / "home", output=tmp_path / "out")
    (finding,) = [finding for finding in checked.findings if finding.check.startswith("disk")]
    made = copies * (checked.task_bytes or {})[name]
    assert finding.message.startswith(f"at most {format_size(made)} needed")


def test_a_small_disk_is_a_warning_with_the_figures(base: Path, small_disk: Path) -> None:
    large = planned("onnx_export", "onnx_export", format="onnx")
    save_file({"a": np.zeros((2500, 1000), np.float16)}, base / "model.safetensors")
    checked = preflight([large], base=base, home=small_disk, output=small_disk)
    (finding,) = [finding for finding in checked.findings if finding.check.startswith("disk")]
    assert finding.verdict is Verdict.WARNING
    assert "8.4 MB free" in finding.message
    assert "cache gc" in finding.remedy


@pytest.mark.parametrize(
    ("adapter", "merged"), [({"peft_type": "LORA"}, 0), ({"peft_type": "LORA", "use_dora": True}, 2048), ({}, 2048)]
)
def test_a_merge_that_peft_computes_needs_the_disk_for_its_weights(
    base: Path, tmp_path: Path, adapter: dict[str, Any], merged: int
) -> None:
    """It writes them although the plan lets it leave them out."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    if adapter:
        (checkpoint / "adapter_config.json").write_text(json.dumps(adapter))
    plan = [
        planned("merge", "merge", {"weights": "deferred"}),
        planned("graph", "onnx_export", {"weights": "deferred"}),
        planned("whole", "onnx_export", {"packaging": ["genai"]}),
    ]
    checked = preflight(plan, base=base, adapter=checkpoint, home=tmp_path / "home", output=tmp_path / "out")
    assert checked.task_bytes == {"merge": merged, "graph": 2 << 20, "whole": 4096 + (2 << 20)}


def test_a_stage_that_is_not_installed_rules_out_or_warns(base: Path, tmp_path: Path) -> None:
    plan = (*PLAN, planned("x", "nonesuch"))
    checked = preflight(plan, base=base, home=tmp_path, output=tmp_path)
    findings = {finding.check: finding for finding in checked.findings}
    assert findings["stage: merge"].verdict is Verdict.OK
    assert findings["stage: nonesuch"].verdict is Verdict.WARNING
    assert "pip install 'slipway-ml[nonesuch]'" in findings["stage: nonesuch"].remedy


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a format whose library is not installed."""
    from slipway import stage

    def absent(name: str, found: Callable[[str], str] = stage.installed_version) -> str:
        return "" if name == "litert-torch" else found(name)

    monkeypatch.setattr(stage, "installed_version", absent)  # every other library is what is installed
    return "litert"


def test_an_export_that_can_make_nothing_here_ends_before_anything_runs(
    base: Path, tmp_path: Path, without: str
) -> None:
    alone = [planned("merge", "merge"), planned("x", without, inputs={"pytorch": "task:merge/pytorch"}, format=without)]
    error = preflight(alone, base=base, home=tmp_path, output=tmp_path).error()
    assert error is not None
    assert (error.reason, error.message) == ("UNSUPPORTED", f"stage: {without}: cannot run on this machine")
    assert "slipway-litert/bin/pip install 'slipway-ml[all,litert]'" in error.remedy
    checked = preflight([*alone, planned("y", "gguf", format="gguf")], base=base, home=tmp_path, output=tmp_path)
    assert checked.error() is None
    (finding,) = [each for each in checked.findings if each.check == f"stage: {without}"]
    assert finding.verdict is Verdict.WARNING
    assert "slipway-litert/bin/pip install" in finding.remedy


def test_elsewhere_only_the_disk_is_checked(base: Path, tmp_path: Path) -> None:
    checked = preflight(PLAN, base=base, home=tmp_path, output=tmp_path, here=False)
    assert {finding.check.partition(":")[0] for finding in checked.findings} == {"disk"}


def test_a_file_in_the_way_of_the_output_is_found_before_any_work(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = preflight(PLAN, base=base, home=tmp_path, output=tmp_path / "file" / "exported").error()
    assert error is not None
    assert error.reason == "FILE_ERROR"
    assert str(tmp_path / "file") in str(error)
    assert "output.directory" in error.remedy


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, ""),
        ({"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 9}, ""),
        ({"architectures": ["ViTModel"], "model_type": "vit"}, "ViTModel"),
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16},
            "decoder (MambaForCausalLM) with layers that keep a state",
        ),
    ],
)
def test_a_format_that_is_not_made_of_this_kind_of_model_is_a_warning(
    base: Path, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    (base / "config.json").write_text(json.dumps(config))
    plan = [planned("merge", "merge", format="pytorch"), planned("onnx_export", "onnx_export", {"opset": None}, "onnx")]
    checked = preflight(plan, base=base, home=tmp_path / "home", output=tmp_path / "out", here=False)
    found = [finding.message for finding in checked.findings if finding.reason == "FAMILY_UNSUPPORTED"]
    assert [said in message for message in found] == ([True] if said else [])
    assert checked.error() is None


@pytest.mark.parametrize(
    "tasks",
    [
        (planned("x", "gguf", {"type": "f16"}),),
        (planned("x", "torchscript", {"level": "none"}),),
        (planned("x", "torch_export", {"level": "none"}),),
        (planned("graph", "onnx_export", {"opset": None}), planned("x", "openvino", {"level": ""})),
        (planned("x", "executorch", {"level": "none"}),),
        (planned("x", "litert", {"level": "none"}),),
    ],
    ids=lambda tasks: str(tasks[-1].stage),
)
@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["ViTModel"], "model_type": "vit"},
        {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv", "rescale_every": 6},
    ],
    ids=["images", "states"],
)
def test_every_format_says_before_work_what_it_is_not_made_of(
    base: Path, tmp_path: Path, tasks: tuple[PlannedTask, ...], config: dict[str, Any]
) -> None:
    (base / "config.json").write_text(json.dumps(config))
    checked = preflight(tasks, base=base, home=tmp_path, output=tmp_path, here=False)
    found = [finding for finding in checked.findings if finding.reason == "FAMILY_UNSUPPORTED"]
    assert found
    assert {finding.check for finding in found} <= {f"stage: {task.stage}" for task in tasks}
    assert all(config["architectures"][0] in finding.message for finding in found)


@pytest.mark.parametrize("stage", ["torchscript", "torch_export", "executorch"])
@pytest.mark.parametrize(
    ("kind", "model_type"), [("MarianMTModel", "marian"), ("WhisperForConditionalGeneration", "whisper")]
)
def test_formats_without_encoder_decoders_name_one_that_takes_them(
    base: Path, tmp_path: Path, stage: str, kind: str, model_type: str
) -> None:
    config = {"architectures": [kind], "model_type": model_type, "is_encoder_decoder": True, "vocab_size": 9}
    (base / "config.json").write_text(json.dumps(config))
    plan = [planned("graph", "onnx_export", {"opset": None}), planned("x", stage, {}, stage)]
    checked = preflight(plan, base=base, home=tmp_path, output=tmp_path, here=False)
    found = [(each.check, each.message) for each in checked.findings if each.reason == "FAMILY_UNSUPPORTED"]
    assert [check for check, _ in found] == [f"stage: {stage}"]
    assert found[0][1].startswith("not run: ")
    assert kind in found[0][1]
    assert found[0][1].endswith("; ONNX takes it")


@pytest.mark.parametrize(
    ("level", "kind", "refused"),
    [("int8", "ViTModel", True), ("fp16", "ViTModel", False), ("int4", "BertModel", False)],
)
def test_integers_that_are_not_made_of_this_kind_of_model_are_a_warning(
    base: Path, tmp_path: Path, level: str, kind: str, refused: bool
) -> None:
    text = {"vocab_size": 9} if kind == "BertModel" else {}
    (base / "config.json").write_text(json.dumps({"architectures": [kind], "model_type": "bert", **text}))
    plan = [planned("x", "quantize", {"level": level, "format": "pytorch"}, f"pytorch-{level}")]
    checked = preflight(plan, base=base, home=tmp_path / "home", output=tmp_path / "out", here=False)
    found = [each for each in checked.findings if each.reason == "FAMILY_UNSUPPORTED"]
    assert [(each.check, kind in each.message, each.verdict) for each in found] == (
        [("stage: quantize", True, Verdict.WARNING)] if refused else []
    )
    assert checked.error() is None


@pytest.mark.parametrize(
    ("kind", "model_type", "refused"),
    [
        ("WhisperForConditionalGeneration", "whisper", True),
        ("T5ForConditionalGeneration", "t5", False),
        ("BertModel", "bert", False),
    ],
)
def test_what_is_done_without_a_calibration_is_said_before(
    base: Path, tmp_path: Path, kind: str, model_type: str, refused: bool
) -> None:
    (base / "config.json").write_text(
        json.dumps(
            {
                "architectures": [kind],
                "model_type": model_type,
                "vocab_size": 9,
                "is_encoder_decoder": kind != "BertModel",
            }
        )
    )
    plan = [planned("calibrate-int4", "calibrate", {"bits": 4}, fallback="integers are rounded")]
    checked = preflight(plan, base=base, home=tmp_path / "home", output=tmp_path / "out", here=False)
    found = [each for each in checked.findings if "integers are rounded" in each.message]
    assert [(each.check, each.verdict, "is not calibrated" in each.message) for each in found] == (
        [("stage: calibrate", Verdict.WARNING, True)] if refused else []
    )
    assert checked.error() is None


def test_the_size_of_activations_is_predicted(base: Path, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 8, "hidden_size": 64, "model_type": "qwen3"}
    (base / "config.json").write_text(json.dumps({**sizes, "architectures": ["Qwen3ForCausalLM"]}))

    def found(**activations: list[str]) -> Any:
        tasks = (planned("onnx_export", "onnx_export", {"activations": activations}, "onnx"),)
        return preflight(tasks, base=base, home=tmp_path / "home", output=tmp_path / "out")

    checked = found(layers=["0", "last"], kinds=["attentions", "hidden_states"])
    (said,) = [finding.message for finding in checked.findings if finding.check == "activations"]
    assert said.startswith("4 outputs with 512 B for each token and 64 B for each pair of tokens: 17.0 MB")
    error = found(layers=["12"]).error()
    assert error is not None
    assert (error.reason, "layers 0 to 11" in error.remedy) == ("PARAMS_INVALID", True)
    crossed = found(kinds=["cross_attentions"]).error()
    assert crossed is not None
    assert (crossed.reason, crossed.remedy) == ("PARAMS_INVALID", "leave cross_attentions out")
    pair = {f"{part}_{name}": 8 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = {**pair, "decoder_layers": 3, "d_model": 64, "is_encoder_decoder": True, "model_type": "marian"}
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["MarianMTModel"]}))
    checked = found(layers=["all"], kinds=["hidden_states", "attentions", "cross_attentions"])
    (said,) = [finding.message for finding in checked.findings if finding.check == "activations"]
    assert said.startswith("25 outputs with 2.8 kB for each token and 448 B for each pair of tokens: ")
    assert "a text and its result of 512 tokens each" in said
    assert not [
        finding
        for finding in preflight(PLAN, base=base, home=tmp_path, output=tmp_path).findings
        if finding.check == "activations"
    ]


@pytest.mark.parametrize(
    ("params", "reason", "told"),
    [
        ({"bits": 4, "time_budget_seconds": 10**7}, "PARAMS_INVALID", "time_budget_seconds"),
        ({"bits": 4, "head": Path("x")}, "STAGE_ERROR", "not JSON serializable"),
    ],
)
def test_parameters_that_a_stage_refuses_are_an_error(
    base: Path, tmp_path: Path, params: dict[str, Any], reason: str, told: str
) -> None:
    """The stage would refuse them after the merge."""
    checked = preflight([planned("int4", "calibrate", params)], base=base, home=tmp_path / "home", output=tmp_path)
    error = checked.error()
    assert error is not None
    assert error.reason == reason
    assert told in error.message
    assert checked.task_bytes == {"int4": 0}

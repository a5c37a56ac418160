"""What a model's code, an engine or a lack of memory raises in an export gets the reason that the rules of recovery know."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from slipway.errors import ModelExportError, ONNXExportError
from slipway.proof.onnx_errors import ORT_ERRORS, translate_ort_errors
from slipway_onnx_export.engines import choose_engine, dynamo, legacy
from slipway_onnx_export.engines.failures import translate_capture_error, translate_tracer_error
from slipway_onnx_export.forms.components import components_of
from slipway_onnx_export.loading.weightless import build_weightless
from slipway_onnx_export.params import OnnxExportParams
from slipway_onnx_export.source import open_source
from support.models.onnx_models import Exported
from support.models.table_models import ROWS, make_row

_LACK = "[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
_MODELS = "transformers.models"


def _row(name: str, folder: Path) -> Path:
    return make_row(next(row for row in ROWS if row.name == name), folder)


def _branch(monkeypatch: pytest.MonkeyPatch, module: str, kind: str) -> None:
    """Let a layer branch on computed values, without effect on the result."""
    layer = getattr(import_module(f"{_MODELS}.{module}"), kind)
    forward = layer.forward

    def branching(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.sum() > 1e30:
            hidden_states = hidden_states * 2
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", branching)


OPT = ("OPT", "opt.modeling_opt", "OPTDecoderLayer")
MARIAN = ("Marian", "marian.modeling_marian", "MarianDecoderLayer")
BERT = ("BERT, masked", "bert.modeling_bert", "BertLayer")
CAPTURED = {"engine": "dynamo"}, "DYNAMIC_SHAPE"
TRACED = {"engine": "legacy", "opset": 17}, "TRACER_WARNING"


@pytest.mark.parametrize(
    ("name", "module", "kind", "engine", "reason"),
    [
        pytest.param(*OPT, *CAPTURED, marks=pytest.mark.slow),
        (*OPT, *TRACED),
        pytest.param(*MARIAN, *TRACED, marks=pytest.mark.slow),
        pytest.param(*BERT, *CAPTURED, marks=pytest.mark.slow),
    ],
)
def test_a_branch_on_values_in_any_family_is_found_by_the_engine(
    monkeypatch: pytest.MonkeyPatch,
    export: Callable[..., Exported],
    tmp_path: Path,
    name: str,
    module: str,
    kind: str,
    engine: dict[str, Any],
    reason: str,
) -> None:
    """The shapes of the interface are learnt before the engine runs; that does not fail on such code."""
    source = _row(name, tmp_path / "model")
    _branch(monkeypatch, module, kind)
    with pytest.raises(ModelExportError) as caught:
        export(source, **engine)
    assert caught.value.reason == reason


@pytest.mark.parametrize("branches", [False, True])
def test_learning_the_interface_leaves_a_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, branches: bool
) -> None:
    """Rotary embeddings for long texts, for one, keep what they computed last."""
    source = open_source(_row("OPT", tmp_path / "model"))
    if branches:
        _branch(monkeypatch, "opt.modeling_opt", "OPTDecoderLayer")
    layer = import_module(f"{_MODELS}.opt.modeling_opt").OPTDecoderLayer
    forward = layer.forward

    def keeping(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = hidden_states
        self.register_buffer("kept", hidden_states, persistent=False)
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", keeping)
    model = build_weightless(source, engine="dynamo", attention=("eager",))
    before = [set(vars(module)) | set(module._buffers) for module in model.modules()]
    components_of(model, source)
    assert [set(vars(module)) | set(module._buffers) for module in model.modules()] == before


@pytest.mark.parametrize("engine", [pytest.param(dynamo, marks=pytest.mark.slow), legacy], ids=["dynamo", "legacy"])
def test_an_optimization_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, export: Callable[..., Exported], tmp_path: Path, engine: Any
) -> None:
    """The rules then leave the optimization out, and the export without it passes."""

    def fail(_model: Any) -> None:
        raise RuntimeError("a pass met a node it does not know")

    monkeypatch.setattr(engine, "optimize_graph", fail)
    source = _row("BERT, classes", tmp_path / "model")
    params = {"engine": engine.__name__.rpartition(".")[2], "opset": 18 if engine is dynamo else 17}
    with pytest.raises(ModelExportError) as caught:
        export(source, **params)
    error = caught.value
    assert (error.reason, error.about["phase"], error.about["cause"]) == (
        "EXPORT_ENGINE_FAILED", "optimization", "RuntimeError",
    )  # fmt: skip
    assert "a node it does not know" in error.message
    assert export(source, **params, optimization="none").facts["parity"] == "passed"


@pytest.mark.parametrize("lack", [MemoryError(), RuntimeError(_LACK)], ids=["python", "torch"])
@pytest.mark.parametrize("translate", [translate_capture_error, translate_tracer_error])
def test_a_lack_of_memory_is_no_fault_of_an_engine(
    tmp_path: Path, lack: Exception, translate: Callable[..., ONNXExportError]
) -> None:
    source = open_source(_row("Llama", tmp_path / "model"))
    with pytest.raises(type(lack)) as caught:
        translate(source, lack, attention="eager")
    assert caught.value is lack


def test_a_lack_of_memory_while_a_graph_is_built_is_no_fault_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from slipway_onnx_export.engines import mobius
    from slipway_onnx_export.interface import GraphRequest

    def lack(_source: Any, _request: Any) -> Any:
        raise RuntimeError(_LACK)

    monkeypatch.setattr(mobius, "build", lack)
    source = open_source(_row("Llama", tmp_path / "model"))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        choose_engine(source, OnnxExportParams(engine="mobius")).build(
            source, GraphRequest(opset=23, runtime="onnxruntime")
        )


@pytest.mark.parametrize(
    ("words", "kind"),
    [("bad_alloc: Failed to allocate memory for requested buffer of size 1", None), ("a node fails", ONNXExportError)],
)
def test_a_lack_of_memory_in_onnx_runtime_is_no_fault_of_a_graph(words: str, kind: type[Exception] | None) -> None:
    failure = ORT_ERRORS[-1]  # RuntimeException
    with (
        pytest.raises(kind or failure),
        translate_ort_errors(lambda error: ONNXExportError(str(error), reason="ONNX_INVALID")),
    ):
        raise failure(words)

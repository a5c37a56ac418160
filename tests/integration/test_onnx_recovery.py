"""Faults of the ONNX export end well without a hand: the command's attempts are in its result, and the graph passes its comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.commands.cli import Done, slipway
from support.faults.seeded import seeded
from support.models.family_models import make_family_model

SLOW = pytest.mark.slow

_ALTERED = """
_forward = {kind}.forward
def _altered(self, {argument}, *args, **kwargs):
{code}
    return _forward(self, {argument}, *args, **kwargs)
{kind}.forward = _altered
"""


def _code(kind: str, argument: str, *lines: str) -> str:
    return "import torch\n" + _ALTERED.format(
        kind=kind, argument=argument, code="\n".join(f"    {one}" for one in lines)
    )


BERT = "transformers.models.bert.modeling_bert"

# Sizes that code takes as plain numbers are those of the trace, for each engine; only fixed ones are left.
_FIXED_FOR_ALL = _code(
    "BertPooler",
    "hidden_states",
    "hidden_states = hidden_states + torch.zeros(1, len(range(hidden_states.shape[1])), 1)",
)
# An operator of torch that neither engine knows; it gives nearly 0 here.
_BESSEL = _code(
    "BertPooler", "hidden_states", "hidden_states = hidden_states + 0 * torch.special.bessel_j0(hidden_states)"
)
# The graph that is built lacks something; traced ones are right.
_WRONG_GRAPH = """
_build = build
def build(source, request):
    graphs = _build(source, request)
    weights = {name: tensor * 1.5 if name.endswith("norm.weight") else tensor for name, tensor in graphs[0].weights.items()}
    return [EngineGraph(graphs[0].component, graphs[0].model, weights)]
"""
# No graph of the whole model can be traced.
_NOT_WHOLE = """
from slipway.errors import ONNXExportError
_traced = _trace
def _trace(component, *args, **kwargs):
    if component.name == "model":
        raise ONNXExportError("the whole model is too much", reason="EXPORT_ENGINE_FAILED")
    return _traced(component, *args, **kwargs)
"""
# The first attempt gets the kill that the kernel sends when memory runs out, and the kernel's counter of such kills goes up.
_KILLED = """
import os, signal, pathlib
_mark = pathlib.Path(os.environ["HOME"], "was-killed")
if not _mark.exists():
    _mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
_COUNTED = """
import pathlib
def _oom_kills():
    return int(pathlib.Path(os.environ["HOME"], "was-killed").exists())
"""


@dataclass(frozen=True)
class Fault:
    """A fault and the attempts after it.

    Attributes:
        model: Name of the model.
        rules: Rules that were applied, in order.
        settings: Settings of the export.
        changes: Code that is run at the end of modules.
        engine: Engine of the final graph.
        opset: Its opset.
        reasons: Reasons of the failed attempts; empty for any.
        fails: Reason of the export's failure; empty if it ends well.
    """

    model: str
    rules: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, str] = field(default_factory=dict)
    engine: str = ""
    opset: int = 0
    reasons: tuple[str, ...] = ()
    fails: str = ""


FAULTS = {
    "out of memory": Fault(
        "qwen3", ("memory-alone",), {}, {"slipway_onnx_export.engines.mobius": _KILLED, "slipway.execution.child_process": _COUNTED}, "mobius", 23, ("OUT_OF_MEMORY",)
    ),
    "a model that no engine writes whole": Fault(
        "qwen3",
        ("onnx-capture-instead-of-construction", "onnx-legacy-instead-of-capture", "onnx-no-cache", "onnx-layer-by-layer"), {},
        {
            "slipway_onnx_export.engines.mobius": _WRONG_GRAPH, "slipway_onnx_export.engines.dynamo": _NOT_WHOLE,
            "slipway_onnx_export.engines.legacy": _NOT_WHOLE,
        }, "dynamo", 23, ("EXPORT_PARITY_FAILED", *["EXPORT_ENGINE_FAILED"] * 3),
    ),
    "an axis that every engine fixes": Fault(
        "bert-classes",
        ("onnx-attention-eager", "onnx-legacy-instead-of-capture", "onnx-static-shapes"),
        {"static_shape": "[2, 32, 0]"}, {BERT: _FIXED_FOR_ALL}, "dynamo", 23,
        ("DYNAMIC_SHAPE", "DYNAMIC_SHAPE", "EXPORT_PARITY_FAILED"),
    ),
    "an operator no engine knows": Fault(
        "bert-classes", ("onnx-legacy-instead-of-capture",), {}, {BERT: _BESSEL},
        reasons=("OPERATOR_UNSUPPORTED", "OPERATOR_UNSUPPORTED"), fails="OPERATOR_UNSUPPORTED",
    ),
}  # fmt: skip


def run(root: Path, fault: Fault) -> Done:
    base = make_family_model(fault.model, root / "base")
    settings: dict[str, Any] = {
        "validation.enabled": "false",
        "formats.pytorch.enabled": "false",
        **{f"formats.onnx.{name}": value for name, value in fault.settings.items()},
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    (root / "home").mkdir()
    path = {"PYTHONPATH": seeded(root / "seeds", dict(fault.changes))} if fault.changes else {}
    return slipway(
        "export", "--json", "--base-model", base, "--checkpoint", "none", "--out", root / "out", *words,
        home=root / "home", HOME=str(root / "home"), **path,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_well_without_a_hand(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    done = run(tmp_path, fault)
    attempts = [attempt for attempt in done.json["attempts"] if attempt["stage"] == "onnx_export"]
    shown = [
        (attempt["outcome"], attempt["rule"], attempt.get("reason"), attempt.get("error_message"))
        for attempt in attempts
    ]
    assert tuple(attempt["rule"] for attempt in attempts[1:]) == fault.rules, shown
    failed = [attempt["reason"] for attempt in attempts if attempt["outcome"] == "failed"]
    assert not fault.reasons or tuple(failed) == fault.reasons
    if fault.fails:
        assert (done.code, done.json["reason"]) == (6, fault.fails)
        for step in (
            "look up aten::special_bessel_j0, which no engine writes", "formats.onnx.opset_version to 0", "formats.onnx.enabled=false",
        ):  # fmt: skip
            assert step in done.json["error_message"]
        return
    assert done.code == 0, done.err
    _assert_reported(Path(done.json["output_directory"]), attempts)
    found = json.loads(Path(done.json["output_directory"], "onnx", "onnx_export.json").read_text())
    assert found["parity"] == "passed"
    assert found["engine"] == fault.engine
    assert fault.opset in (0, found["opset"])


def _assert_reported(folder: Path, attempts: list[dict[str, Any]]) -> None:
    """The report's data has every attempt with its rule and reason, and the page shows them."""
    report = json.loads((folder / "report.json").read_text())["result"]["attempts"]
    assert [each for each in report if each["stage"] == "onnx_export"] == attempts
    page = (folder / "report.html").read_text()
    for attempt in attempts:
        assert not attempt["rule"] or attempt["rule"] in page
        assert attempt["outcome"] != "failed" or attempt["reason"] in page

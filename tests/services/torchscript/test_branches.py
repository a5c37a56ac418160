"""Control flow that a trace loses: found, kept by compiling, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipway.errors import TorchGraphError
from support.models.quantize_models import save_tiny

from .conftest import Export

torch = pytest.importorskip("torch", reason="the extra torchscript is not installed")


class OnValues(torch.nn.Module):
    """A layer that computes otherwise for negative sums, in code that torch.jit.script compiles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class OnKeywords(torch.nn.Module):
    """The same in code that it does not compile."""

    def forward(self, x: torch.Tensor, **others: object) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class Around(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def long_texts_differ(self: Any, x: torch.Tensor) -> torch.Tensor:  # takes the place of a method of transformers
    gated = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    if x.shape[1] > 7:
        return self.down_proj(gated) * 2.0
    return self.down_proj(gated)


def traced_texts_differ(self: Any, x: torch.Tensor) -> torch.Tensor:
    found = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return found * 2.0 if torch.jit.is_tracing() else found


def test_a_lost_branch_is_named() -> None:
    from slipway_torchscript.tracing import traced

    with pytest.raises(TorchGraphError, match=r"lose a branch at test_branches.py:\d+: if x.sum\(\) > 0:") as caught:
        traced(Around(OnValues()), (torch.ones(2),), control_flow="trace")
    assert caught.value.reason == "TRACER_WARNING"
    assert caught.value.about["kind"] == "python boolean"


def test_a_module_that_branches_is_compiled_and_the_rest_traced() -> None:
    from slipway_torchscript.tracing import frozen, traced

    script, branches = traced(Around(OnValues()), (torch.ones(2),), control_flow="script")
    assert not branches
    graph = frozen(script, optimize=False)
    assert graph(torch.ones(2)).tolist() == [3.0, 3.0]
    assert graph(-torch.ones(2)).tolist() == [0.0, 0.0]  # the other branch, which the sample did not take


def test_the_outermost_module_is_compiled_too() -> None:
    from slipway_torchscript.tracing import traced

    script, _ = traced(OnValues(), (torch.ones(2),), control_flow="script")
    assert script(-torch.ones(2)).tolist() == [-1.0, -1.0]


def test_a_branch_that_cannot_be_compiled_is_refused_by_name() -> None:
    from slipway_torchscript.tracing import traced

    with pytest.raises(TorchGraphError, match="cannot compile inner") as caught:
        traced(Around(OnKeywords()), (torch.ones(2),), control_flow="script")
    assert caught.value.reason == "TORCHSCRIPT_UNSCRIPTABLE"
    assert caught.value.about["file"] == Path(__file__).name


def test_a_model_that_branches_on_length_through_the_stage(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace is refused; kept without proof it differs at the first call beyond; compiled it is right."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    source = save_tiny(tmp_path / "source")
    monkeypatch.setattr(Qwen3MLP, "forward", long_texts_differ)
    for control_flow, reason in (("trace", "TRACER_WARNING"), ("prove", "EXPORT_PARITY_FAILED")):
        with pytest.raises(TorchGraphError) as caught:
            export(source, control_flow=control_flow)
        assert caught.value.reason == reason
        (tmp_path / "torchscript").rename(tmp_path / control_flow)
    assert caught.value.about["case"] == "a text, nothing before"
    _, ctx = export(source, control_flow="script")
    assert ctx.facts["control_flow"] == "script"
    assert max(ctx.facts["differences"].values()) < 1e-5


def test_a_loss_without_a_warning_is_found_by_the_comparison(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    monkeypatch.setattr(Qwen3MLP, "forward", traced_texts_differ)
    with pytest.raises(TorchGraphError, match="results differ by") as caught:
        export(save_tiny(tmp_path / "source"))
    assert caught.value.reason == "EXPORT_PARITY_FAILED"


@pytest.mark.slow
def test_a_program_is_not_made_of_a_branch_on_length(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    monkeypatch.setattr(Qwen3MLP, "forward", long_texts_differ)
    with pytest.raises(TorchGraphError) as caught:
        export(save_tiny(tmp_path / "source"), "torch_export")
    assert caught.value.reason in ("DYNAMIC_SHAPE", "EXPORT_PARITY_FAILED")


def test_a_program_is_not_made_of_a_branch_on_values() -> None:
    from slipway_torchscript.capture import captured
    from slipway_torchscript.interface import Interface

    interface = Interface(OnValues(), ("input_ids",), ("logits",), (), frozenset(), False, 9, 0, torch.float32)
    with pytest.raises(TorchGraphError, match="branches on values") as caught:
        captured(interface, (torch.ones(2, 6),), 64)
    assert caught.value.reason == "DYNAMIC_SHAPE"
    assert caught.value.about["kind"] == "data"

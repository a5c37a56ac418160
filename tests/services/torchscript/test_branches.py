"""Control flow that a trace loses: found, kept by compiling, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipway.errors import TorchGraphError
from support.models.quantize_models import save_tiny

from .conftest import Export

pytest.importorskip("torch", reason="the extra torchscript is not installed")
import torch

from support.faults.branching import long_texts_differ


class OnValues(torch.nn.Module):
    """A layer that computes otherwise for negative sums, in code that torch.jit.script compiles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class OnLength(torch.nn.Module):
    """A layer that computes otherwise for long texts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] > 7 else x


class OnInfinity(torch.nn.Module):
    """The guard of transformers' encoders, which no random tokens reach."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isinf().any():
            return x.clamp(-1000, 1000)
        return x * 2 if x.shape[0] > 7 else x


class OnOneBefore(torch.nn.Module):
    """A decoder that computes otherwise after exactly one token."""

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, places: torch.Tensor, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        new = (ids % 4).float()[:, None, :, None] + places[:, None, :, None]
        every = torch.cat([past[0], new.expand(-1, -1, -1, 4)], 2)
        found = every.mean(2).expand(-1, ids.shape[1], -1) * mask.float().mean()
        before = past[0].shape[2]
        return (found * 2 if before > 1 or before == 0 else found), [every]


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


def traced_texts_differ(self: Any, x: torch.Tensor) -> torch.Tensor:
    found = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return found * 2.0 if torch.jit.is_tracing() else found


def test_a_lost_branch_is_named() -> None:
    from slipway_torchscript.tracing import trace_module

    with pytest.raises(TorchGraphError, match=r"lose a branch at test_branches.py:\d+: if x.sum\(\) > 0:") as caught:
        trace_module(Around(OnValues()), (torch.ones(2),), control_flow="trace")
    assert caught.value.reason == "TRACER_WARNING"
    assert caught.value.about["kind"] == "python boolean"


def test_a_module_that_branches_is_compiled_and_the_rest_traced() -> None:
    from slipway_torchscript.tracing import freeze_script, trace_module

    script, branches = trace_module(Around(OnValues()), (torch.ones(2),), control_flow="script")
    assert not branches
    graph = freeze_script(script, optimize=False)
    assert graph(torch.ones(2)).tolist() == [3.0, 3.0]
    assert graph(-torch.ones(2)).tolist() == [0.0, 0.0]  # the other branch, which the sample did not take


def test_the_outermost_module_is_compiled_too() -> None:
    from slipway_torchscript.tracing import trace_module

    script, _ = trace_module(OnValues(), (torch.ones(2),), control_flow="script")
    assert script(-torch.ones(2)).tolist() == [-1.0, -1.0]


def test_a_branch_that_cannot_be_compiled_is_refused_by_name() -> None:
    from slipway_torchscript.tracing import trace_module

    with pytest.raises(TorchGraphError, match="cannot compile inner") as caught:
        trace_module(Around(OnKeywords()), (torch.ones(2),), control_flow="script")
    assert caught.value.reason == "TORCHSCRIPT_UNSCRIPTABLE"
    assert caught.value.about["file"] == Path(__file__).name


def test_a_trace_is_proven_only_of_branches_on_sizes() -> None:
    from slipway_torchscript.tracing import trace_module

    with pytest.raises(TorchGraphError, match=r"if x.isinf\(\).any\(\):") as caught:
        trace_module(Around(OnInfinity()), (torch.ones(2),), control_flow="prove")
    assert caught.value.reason == "TRACER_WARNING"
    assert "shape" not in caught.value.about["places"]


def test_a_call_after_exactly_one_token_is_compared() -> None:
    """The condition of the capture that the past is not one token is dropped, because kernels bring the same one."""
    from slipway.proof.comparison import cases, sample_case
    from slipway_torchscript.capture import capture_module
    from slipway_torchscript.export import compare_graph, compute_expected
    from slipway_torchscript.interface import Interface

    names = ("input_ids", "attention_mask", "position_ids", "past"), ("logits", "present")
    interface = Interface(OnOneBefore(), *names, ((1, 4),), frozenset({"logits"}), False, 9, 0, torch.float32)
    program = capture_module(interface, interface.feeds(sample_case(cached=True, one_row=False)), 64)
    assert not any(guard.endswith((" != 1", " > 1")) for guard in program._guards_code)
    calls = cases(cached=True, one_row=False, positions=64, thresholds=(), longest=64)
    with pytest.raises(TorchGraphError, match="differ") as caught:
        compare_graph(
            program.module(), compute_expected(interface, calls), per_token=interface.per_token, dtype=torch.float32
        )
    assert caught.value.about["case"] == "one token after one"


def test_only_conditions_on_the_sizes_of_inputs_are_dropped() -> None:
    from slipway_torchscript.capture import is_condition_on_one

    size, before = "L['input_ids'].size()[1]", "L['past'][0].size()[2]"
    dropped = [f"{size} != 1", f"{size} > 1", f"({before} + {size}) != 1", f"{before}*{size} != 1"]
    kept = [f"Mod({size}, 2) != 1", f"{size} + 5 > 1", f"{before} > 10", f"{before} + {size} > 1 or True"]
    assert [is_condition_on_one(each) for each in dropped + kept] == [True] * len(dropped) + [False] * len(kept)


@pytest.mark.parametrize(
    "results",
    [
        (torch.zeros(1, 1, 9),),
        (torch.zeros(1, 1, 9), [torch.zeros(1, 1, 1, 4)] * 2),
        (torch.zeros(1, 1, 9), [torch.zeros(1, 1, 2, 4)]),
        (torch.zeros(1, 1), [torch.zeros(1, 1, 1, 4)]),
        (torch.zeros(1, 1, 9), None),
        torch.zeros(2, 1, 1, 9),
    ],
    ids=("fewer outputs", "more layers", "longer cache", "fewer axes", "no cache", "one tensor"),
)
def test_results_of_another_form_differ_by_name(results: Any) -> None:
    from slipway.proof.comparison import Case
    from slipway_torchscript.export import Expected, compare_graph

    feeds = (torch.zeros(1, 1), torch.ones(1, 1))
    wanted = {"logits": torch.zeros(1, 1, 9), "present": [torch.zeros(1, 1, 1, 4)]}
    expected = [Expected(Case("one token", 1, 1), feeds, wanted)]
    with pytest.raises(TorchGraphError, match=r"instead of \[\(1, 1, 9\), \[\(1, 1, 1, 4\)\]\]") as caught:
        compare_graph(lambda *_: results, expected, per_token=frozenset({"logits"}), dtype=torch.float32)
    assert caught.value.reason == "EXPORT_PARITY_FAILED"


def test_remedies_name_what_a_user_can_choose() -> None:
    """Not the parameters of the stage, which recovery has gone through."""
    from slipway_torchscript.tracing import trace_module

    said = []
    for control_flow in ("trace", "script", "prove"):
        with pytest.raises(TorchGraphError) as caught:
            trace_module(Around(OnKeywords()), (torch.ones(2),), control_flow=control_flow)
        said.append(caught.value.remedy)
    assert len(set(said)) == 1
    assert "ONNX" in said[0]
    assert not any(word in said[0] for word in ("control_flow", "attention"))


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


@pytest.mark.parametrize(
    ("module", "said", "kind"),
    [(OnValues(), "branches on values", "data"), (OnLength(), "an axis would be fixed", "axis")],
    ids=("values", "length"),
)
def test_a_program_is_not_made_of_a_branch(module: torch.nn.Module, said: str, kind: str) -> None:
    from slipway_torchscript.capture import capture_module
    from slipway_torchscript.interface import Interface

    interface = Interface(module, ("input_ids",), ("logits",), (), frozenset(), False, 9, 0, torch.float32)
    with pytest.raises(TorchGraphError, match=said) as caught:
        capture_module(interface, (torch.ones(2, 6),), 64)
    assert caught.value.reason == "DYNAMIC_SHAPE"
    assert caught.value.about["kind"] == kind

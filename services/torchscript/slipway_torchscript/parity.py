"""Compare a written graph with the PyTorch model, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from slipway.errors import TorchGraphError
from slipway.proof.cases import Case
from slipway.proof.differences import LIMITS, Difference, difference, largest
from slipway_torchscript.interface import Interface, Tensors

Run = Callable[..., Any]


@dataclass(frozen=True)
class Expected:
    """A call, and PyTorch's results for it.

    Attributes:
        case: The shape.
        feeds: The inputs.
        results: The outputs by name. Only results at tokens count, not at padding.
    """

    case: Case
    feeds: Tensors
    results: dict[str, Any]


@torch.no_grad()
def expect(interface: Interface, cases: Iterable[Case]) -> list[Expected]:
    """Compute the module's results for every case."""
    expected = []
    for case in cases:
        feeds = interface.feeds(case)
        expected.append(Expected(case, feeds, dict(zip(interface.outputs, interface.module(*feeds), strict=True))))
    return expected


@torch.no_grad()
def compare(run: Run, expected: list[Expected], *, per_token: frozenset[str], dtype: torch.dtype) -> dict[str, float]:
    """Run a graph on every case; return its largest difference from PyTorch by case.

    Raises:
        TorchGraphError: ``EXPORT_PARITY_FAILED`` for the first case that differs or that the graph cannot run.
    """
    allowed = LIMITS[str(dtype).removeprefix("torch.")]
    differences_by_case = {}
    for each in expected:
        try:
            results = run(*each.feeds)
        except Exception as error:  # a graph that depends on its sample's shape raises errors of any class
            raise _parity_error(each.case, f"the graph cannot run it: {' '.join(str(error).split())[-300:]}") from error
        if (result_shapes := _shapes(results)) != (shapes := _shapes(list(each.results.values()))):
            raise _parity_error(each.case, f"results have the shapes {result_shapes} instead of {shapes}")
        differences = [
            _difference(name, result, wanted, each.feeds[1], per_token=per_token)
            for (name, wanted), result in zip(each.results.items(), results, strict=True)
        ]
        worst = max(difference.share for difference in differences)
        if worst > allowed:
            wrong = largest(differences).largest
            raise _parity_error(each.case, f"results differ by {wrong:.2e}", max_abs_diff=wrong, allowed=allowed)
        differences_by_case[each.case.name] = float(f"{worst:.2e}")
    return differences_by_case


def _shapes(results: Any) -> Any:
    """Return the shapes of results, nested like the results; for anything but a tensor, the name of its class."""
    if isinstance(results, (list, tuple)):
        return [_shapes(each) for each in results]
    return tuple(results.shape) if isinstance(results, torch.Tensor) else type(results).__name__


def _difference(name: str, result: Any, wanted: Any, mask: torch.Tensor, *, per_token: frozenset[str]) -> Difference:
    """Return the difference of an output, without positions of padding."""
    if isinstance(wanted, (list, tuple)):
        pairs = [
            (one.transpose(1, 2)[mask > 0], other.transpose(1, 2)[mask > 0])
            for one, other in zip(result, wanted, strict=True)
        ]
    elif name in per_token:
        real = mask[:, -wanted.shape[1] :] > 0
        pairs = [(result[real], wanted[real])]
    else:
        pairs = [(result, wanted)]
    return largest(difference(one.float().numpy(), other.float().numpy(), overflow=True) for one, other in pairs)


def _parity_error(case: Case, what: str, **about: object) -> TorchGraphError:
    return TorchGraphError(
        f"the graph is not what PyTorch computes for {case.name} "
        f"({case.batch} x {case.sequence} tokens after {case.past}): {what}",
        reason="EXPORT_PARITY_FAILED",
        remedy="leave this format out for this model",
        about={"case": case.name, **about},
    )

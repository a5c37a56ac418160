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
        results: The outputs by name, in which only places of tokens count.
    """

    case: Case
    feeds: Tensors
    results: dict[str, Any]


@torch.no_grad()
def expect(interface: Interface, cases: Iterable[Case]) -> list[Expected]:
    """Compute the results of the module for every case."""
    found = []
    for case in cases:
        feeds = interface.feeds(case)
        found.append(Expected(case, feeds, dict(zip(interface.outputs, interface.module(*feeds), strict=True))))
    return found


@torch.no_grad()
def compare(run: Run, expected: list[Expected], *, per_token: frozenset[str], dtype: torch.dtype) -> dict[str, float]:
    """Run a graph on every case; return its largest difference by case.

    Raises:
        TorchGraphError: ``EXPORT_PARITY_FAILED`` for the first case that differs or that the graph cannot run.
    """
    allowed = LIMITS[str(dtype).removeprefix("torch.")]
    found = {}
    for each in expected:
        try:
            results = run(*each.feeds)
        except Exception as error:  # a graph raises errors of any class where its sample's shape is part of it
            raise _failed(each.case, f"the graph cannot run it: {' '.join(str(error).split())[-300:]}") from error
        if (found_shapes := _shapes(results)) != (shapes := _shapes(list(each.results.values()))):
            raise _failed(each.case, f"results have the shapes {found_shapes} instead of {shapes}")
        differences = [
            _difference(name, result, wanted, each.feeds[1], per_token=per_token)
            for (name, wanted), result in zip(each.results.items(), results, strict=True)
        ]
        worst = max(difference.share for difference in differences)
        if worst > allowed:
            wrong = largest(differences).largest
            raise _failed(each.case, f"results differ by {wrong:.2e}", max_abs_diff=wrong, allowed=allowed)
        found[each.case.name] = float(f"{worst:.2e}")
    return found


def _shapes(results: Any) -> Any:
    """Return the shapes of results, in lists as they are; a class that is no tensor by its name."""
    if isinstance(results, (list, tuple)):
        return [_shapes(each) for each in results]
    return tuple(results.shape) if isinstance(results, torch.Tensor) else type(results).__name__


def _difference(name: str, result: Any, wanted: Any, mask: torch.Tensor, *, per_token: frozenset[str]) -> Difference:
    """Return the difference of an output; places of padding do not count."""
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
    return largest(difference(one.float().numpy(), other.float().numpy()) for one, other in pairs)


def _failed(case: Case, what: str, **about: object) -> TorchGraphError:
    return TorchGraphError(
        f"the graph is not what PyTorch computes for {case.name} "
        f"({case.batch} x {case.sequence} tokens after {case.past}): {what}",
        reason="EXPORT_PARITY_FAILED",
        remedy="leave this format out for this model",
        about={"case": case.name, **about},
    )

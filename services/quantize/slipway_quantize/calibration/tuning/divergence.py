"""How far a model's results are from another's, as a loss and as a measure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipway.model.families import Comparison, Family

_MULTIPLE = ("regression", "multi_label_classification")


def compares_distributions(family: Family, config: Any) -> bool:
    """Return whether a family's results are distributions; otherwise they are compared as numbers."""
    if family.comparison is Comparison.EMBEDDINGS:
        return False
    numbers = getattr(config, "problem_type", None) in _MULTIPLE or getattr(config, "num_labels", 2) == 1
    return not (family.comparison is Comparison.CLASSES and numbers)


def divergence(reference: Tensor, other: Tensor, *, distributions: bool) -> Tensor:
    """Return the sum over positions of the Kullback–Leibler divergence in nats, or of the relative squared error.

    Args:
        reference: (positions, values)
        other: (positions, values)
        distributions: Whether values are logits.
    """
    if distributions:
        return torch.nn.functional.kl_div(
            other.log_softmax(-1), reference.log_softmax(-1), reduction="sum", log_target=True
        )
    energy = reference.square().sum(-1).clamp_min(1e-12)
    return ((other - reference).square().sum(-1) / energy).sum()


def kept_form(reference: Tensor, *, distributions: bool) -> Tensor:
    """Return the form of exact results that :func:`pass_back` takes: probabilities, or the results themselves."""
    return reference.softmax(-1) if distributions else reference


def pass_back(reference: Tensor, other: Tensor, *, distributions: bool) -> None:
    """Compute the gradients of the divergence; that of the Kullback–Leibler divergence is the difference of the probabilities.

    Args:
        reference: As :func:`kept_form` returns it. (positions, values)
        other: (positions, values)
        distributions: Whether values are logits.
    """
    if distributions:
        other.backward(other.detach().softmax(-1).sub_(reference))
    else:
        divergence(reference, other, distributions=False).backward()


def drawn_gradients(results: Tensor, *, distributions: bool, draw: torch.Generator) -> Tensor:
    """Draw gradients of the divergence at the results, whose mean product is its second derivative: the Fisher information.

    For distributions they are those of the likelihood of tokens that are drawn from the results themselves.

    Args:
        results: (positions, values)
        distributions: Whether values are logits.
        draw: Draws tokens, or directions.
    """
    exact = results.detach()
    if not distributions:
        energy = exact.square().sum(-1, keepdim=True).clamp_min(1e-12)
        return torch.randn(exact.shape, generator=draw) * (2 / energy).sqrt()
    found = exact.softmax(-1)
    drawn = torch.multinomial(found, 1, generator=draw)
    return found.scatter_add_(1, drawn, torch.full_like(found[:, :1], -1))

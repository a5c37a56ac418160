"""Measure what errors of an embedding do to the model's results: its codes are the head's, whose own inputs say nothing of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipway_quantize.calibration.streaming.crew import Crew
from slipway_quantize.calibration.streaming.layers import multiply
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.calibration.tuning.divergence import drawn_gradients
from slipway_quantize.calibration.windows import Batch


def embedding_moments(
    models: Sequence[StreamedModel], batches: Sequence[Batch], *, crew: Crew, seed: int, on_batch: Callable[[], None]
) -> Tensor:
    """Return what is added to the second moments of the head's inputs at one position, so that they weigh the embedding's errors too. (K, K).

    To second order, errors of weights add half of their Fisher information to the divergence. For an embedding that is the mean product of
    the gradients of its rows, for tokens drawn from the model's own results; for the head it is the mean product of its inputs times the variance
    of these draws. Both are summed over tokens here, because each token is looked up as often as it is the result.

    Args:
        models: The model, for each member of the crew; its embedding is tied to its head.
        batches: Windows to compute.
        crew: Computes batches side by side.
        seed: Seed of the tokens that are drawn.
        on_batch: Called before each batch.
    """
    width = models[0].model.get_input_embeddings().weight.shape[1]

    def measure(member: int) -> tuple[Tensor, float]:
        moments, variance = torch.zeros(width, width), 0.0
        for number in crew.share(member, range(len(batches))):
            on_batch()
            found = _measure(models[member], batches[number], torch.Generator().manual_seed(seed + number))
            moments += found[0]
            variance += found[1]
        return moments, variance

    for model in models:
        model.save_memory()
    try:
        found = crew.run(measure)
    finally:
        for model in models:
            model.save_memory(on=False)
    total = torch.stack([moments for moments, _ in found]).sum(0)
    return total / max(sum(variance for _, variance in found), 1e-30)


def _measure(model: StreamedModel, batch: Batch, draw: torch.Generator) -> tuple[Tensor, float]:
    """Return the sums of a batch: of the products of the rows' gradients (K, K), and of the draws' variances."""
    rows: list[Tensor] = []
    with model.looking_up(rows):
        results = model.outputs(batch)
    (table,) = rows
    variance = float((1 - results.detach().softmax(-1).square().sum(-1)).sum(dtype=torch.float64))
    if not math.isfinite(variance):  # the pass over the blocks says where it begins
        return torch.zeros(table.shape[1], table.shape[1]), 0.0
    results.backward(drawn_gradients(results, distributions=True, draw=draw))
    assert table.grad is not None
    columns = table.grad.T.contiguous()  # (K, rows)
    return multiply(columns, columns), variance

"""Divide the time budget: how much text, how many steps, and how much at once.

Work is counted in operations, not in seconds, so that the same parameters give the same result on a busy machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipway_quantize.calibration.params import CalibrateParams
from slipway_quantize.calibration.rounding.methods import NEAREST
from slipway_quantize.calibration.streaming.layers import PIECE_WEIGHTS
from slipway_quantize.calibration.streaming.model import StreamedModel
from slipway_quantize.levels import WIDE

NOMINAL = 150e9
"""Floating-point operations a second that are planned for: half of what two idle cores of a server do."""
_BLOCKS_SHARE = 0.35
"""Share of the budget for the pass over the blocks, if tuning follows."""
_LEAST_STEPS = 40
_LEAST_WINDOWS = 16
MOST_STEPS, MOST_TIED_STEPS, MOST_STATES_STEPS = 64, 100, 200
"""More steps gain little for their time. They pay where a head shares its codes with the embedding, whose errors all positions see, and most
where hidden states are compared."""
STEP_WINDOWS = 8
_COSTED = 16
"""Windows on which the cost of rounding each layer is estimated."""
_EMBEDDED = 8
"""One window in so many measures the effect of errors of an embedding."""
_BLOCK_WINDOWS = 16
_MEMBERS = 2
"""Copies of a model that is small enough to compute several windows at once."""
_ALONE_SHARE, _LEAST_ALONE, _MOST_ALONE = 0.5, 2, 16
"""Share of the budget, beside it, for the divergence that each layer adds alone; the fewest and the most windows for it."""
_LARGEST_RESULTS = 1 << 25
"""Most values of results that are computed at once, 128 MiB in float32."""
_LARGEST_INSIDE = 1 << 27
"""Most values inside all blocks that are kept for gradients; beyond that, they are computed again."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes of a calibration.

    Attributes:
        windows: Most windows that the blocks see, held-out ones included.
        members: Copies of the model that compute side by side, each with its share of the threads.
        at_once: Windows whose results each of them computes at once.
        in_blocks: Windows that a block computes at once.
        steps: Steps of the tuning; 0 leaves it out.
        save_memory: Whether blocks are computed again for their gradients.
        alone: Windows on which each layer is judged alone; 0 leaves it out.
        costed: Windows on which the cost of rounding each layer is estimated; 0 leaves it out.
        embedded: Windows on which the embedding's share is measured in errors of a head that is tied to it; 0 leaves it out.
    """

    windows: int
    members: int
    at_once: int
    in_blocks: int
    steps: int
    save_memory: bool
    alone: int = 0
    costed: int = 0
    embedded: int = 0


def plan_effort(model: StreamedModel, params: CalibrateParams) -> Effort:
    """Divide the budget of ``params`` for a model."""
    shapes = [layer.stored.shape for layer in model.layers.values()]
    weights = sum(shape.numel() for shape in shapes)
    budget = params.time_budget_seconds * NOMINAL
    tuned = params.method == "autoround"
    embeds = bool(model.tied) and params.method != "rtn"
    costed = _COSTED if params.wide_share and params.bits < WIDE else 0
    # Two passes and a third over the rounded blocks, one and a third over the exact ones, and two products of inputs; an eighth of the windows
    # is passed back, blocks computed again, where an embedding counts.
    per_window = params.window_tokens * (6 if params.method == NEAREST else 12 if embeds else 11) * weights
    affordable = int(budget / per_window)
    alone = int(budget * _ALONE_SHARE / (params.window_tokens * 2 * weights * (len(shapes) + 1)))
    alone = min(alone, _MOST_ALONE) if params.sensitivity and alone >= _LEAST_ALONE else 0
    windows = min(params.windows, max(_LEAST_WINDOWS, int(affordable * _BLOCKS_SHARE)))
    inner = max((max(shape) for shape in shapes if shape[0] != model.vocabulary), default=model.vocabulary)
    in_blocks = max(1, min(_BLOCK_WINDOWS, _LARGEST_RESULTS // (params.window_tokens * inner)))
    widest = max(model.vocabulary, *(shape[0] for shape in shapes))
    at_once = max(1, min(STEP_WINDOWS, _LARGEST_RESULTS // (params.window_tokens * widest)))
    inside = at_once * params.window_tokens * sum(2 * shape[0] + shape[1] for shape in shapes)
    save_memory = inside > _LARGEST_INSIDE
    # Each copy keeps moments of inputs, and gradients for the tuning; results of a large vocabulary leave no room for two.
    small = inner * inner <= PIECE_WEIGHTS and at_once >= _MEMBERS
    quick = at_once == STEP_WINDOWS and not save_memory
    members = _MEMBERS if params.threads >= _MEMBERS and (quick if tuned else small) else 1
    at_once, in_blocks = at_once // members, max(1, in_blocks // members)
    per_step = STEP_WINDOWS * params.window_tokens * (10 if save_memory else 8) * weights
    steps = int((budget - windows * per_window) / per_step)
    if not tuned:
        windows = min(params.windows, max(_LEAST_WINDOWS, affordable))
        steps = 0
    else:
        most = MOST_TIED_STEPS if model.tied else MOST_STATES_STEPS if model.tunes_hidden_states else MOST_STEPS
        steps = max(_LEAST_STEPS, min(most, steps))
    embedded = windows // _EMBEDDED if embeds else 0
    return Effort(windows, members, at_once, in_blocks, steps, save_memory, alone, costed, embedded)

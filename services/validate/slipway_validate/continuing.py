"""Which prompts are continued at length, and for how long."""

from __future__ import annotations

import numpy as np

from slipway.model.configuration import ModelConfig
from slipway_validate.lengths import longest_text
from slipway_validate.params import SampleParams
from slipway_validate.preparation import Prepared, values_per_token
from slipway_validate.protocol.messages import LongSpec, RunResult

LEAST_TOKENS = 16
"""Shorter continuations are among the others."""
_FILES = 2
"""Files of results that lie on the disk at once: the reference's and an output's."""


def long_spec(
    prepared: Prepared, config: ModelConfig, params: SampleParams, *, reference: RunResult | None = None
) -> LongSpec | None:
    """Return the long continuations to compute; None if none are asked for or the model is too small for them.

    Args:
        prepared: The samples.
        config: The model's configuration.
        params: Parameters of the stage.
        reference: The reference's result, whose continuations outputs compute too; None for the reference itself.
    """
    if not params.continuation_tokens:
        return None
    prompts = prepared.prompts(params.continuation_prompts)
    room = longest_text(config, prepared.family) - max(map(len, prompts), default=0)
    values = values_per_token(config.text, prepared.family) * np.dtype(np.float32).itemsize
    affordable = params.logit_bytes // (_FILES * values * max(1, len(prompts)))
    count = min(params.continuation_tokens, room, affordable)
    if not prompts or count < LEAST_TOKENS:
        return None
    given = reference.long.continuations if reference is not None and reference.long is not None else ()
    return LongSpec(prompts=prompts, new_tokens=count, given=given)

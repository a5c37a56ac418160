"""The validate stage: every output of an export against base + adapter, with proof, speed and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.stage import Context, Effort, Provider, Role, Stage, library_provider
from slipway_validate.params import ValidateParams


def run(inputs: Mapping[str, Path], params: ValidateParams, ctx: Context) -> dict[str, Path]:
    """Validate every input beside ``base``, ``adapter`` and ``heldout``.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the reference, the tokenizer or the held-out text is not usable.
        StageError: ``CANCELLED``; ``DISK_FULL``.
    """
    from slipway_validate.validation import validate

    return {"validation": validate(inputs, params, ctx)}


def probe() -> tuple[Provider, ...]:
    """Runtimes that outputs can be run with here."""
    return tuple(library_provider(name) for name in ("transformers", "peft", "onnxruntime"))


STAGE = Stage(
    name="validate",
    version=5,
    inputs=("base",),
    outputs=("validation",),
    params=ValidateParams,
    run=run,
    libraries=("torch", "transformers", "peft", "onnxruntime", "compressed-tensors", "tensorrt", "tensorrt-rtx"),
    more_inputs=True,
    device_bound=True,  # an engine runs only on the GPU it was built for, and speed is measured
    probe=probe,
    role=Role.VALIDATION,
    effort=Effort(
        seconds=10.0,
        seconds_per_gb=40.0,
        phases={"tokenize": (0.0, 0.02), "reference": (0.02, 0.15), "output": (0.15, 0.97)},
    ),
    model_memory=2.0,  # the reference is computed in 32 bits, of a model that is stored in 16
)

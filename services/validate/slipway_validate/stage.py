"""The validate stage: compare every output of an export with the reference, and measure speed and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.machine.onnx_runtime import runtime_provider
from slipway.stage import Context, Effort, Forecast, Hardware, Installation, Provider, Role, Stage, library_provider
from slipway_validate.params import BY_LAYERS, ValidateParams

_SLOWER = {"quick": 1, "standard": 3, "thorough": 6}
"""How much longer a GB takes, by the effort of the validation."""


def run(inputs: Mapping[str, Path], params: ValidateParams, ctx: Context) -> dict[str, Path]:
    """Validate every input that is not in :data:`slipway.validation.inputs.NOT_OUTPUTS`; without an adapter, against the base itself.

    Raises:
        ValidationError: ``VALIDATION_IMPOSSIBLE``: the reference, the tokenizer or the held-out text cannot be used.
        StageError: ``CANCELLED``; ``DISK_FULL``.
    """
    from slipway_validate.validation import validate

    return {"validation": validate(inputs, params, ctx)}


def probe() -> tuple[Provider, ...]:
    """Return the runtimes that can run outputs on this machine."""
    return (library_provider("transformers"), library_provider("peft"), runtime_provider())


STAGE = Stage(
    name="validate",
    version=17,
    inputs=("base",),
    outputs=("validation",),
    params=ValidateParams,
    run=run,
    libraries=(
        "torch",
        "transformers",
        "peft",
        "onnxruntime",
        "compressed-tensors",
        "onnx-ir",
        "tensorrt",
        "tensorrt-rtx",
    ),
    more_inputs=True,
    hardware=Hardware(
        device_bound=True,  # an engine runs only on the GPU it was built for, and speed is measured
        memory=2.0,  # a graph in 32 bits is loaded as a whole; the weights of PyTorch models are mapped
        less_memory=BY_LAYERS,
    ),
    installation=Installation(probe=probe),
    role=Role.VALIDATION,
    effort=Effort(
        seconds=10.0,
        seconds_per_gb=40.0,
        phases={"tokenize": (0.0, 0.02), "reference": (0.02, 0.15), "stored": (0.15, 0.2), "output": (0.15, 0.97)},
    ),
    forecast=Forecast(work_bytes=lambda params, made, _: made * _SLOWER[params.effort]),
    recovery=Path(__file__).with_name("recovery.yaml"),
)

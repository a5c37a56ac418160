"""Compare the weights that the outputs store with base and adapter, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.stage import Context
from slipway.validation.inputs import NOT_OUTPUTS
from slipway.validation.survival import AdapterSurvival
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import SURVIVAL_FILE, Spec, SurvivalSpec


def compare_stored_weights(
    inputs: Mapping[str, Path], ctx: Context, *, folder: Path, timeout_seconds: float
) -> dict[str, AdapterSurvival]:
    """Return what the stored weights of each output hold of the adapter, by the output's name; nothing without an adapter.

    Args:
        inputs: Inputs of the validation.
        ctx: The stage.
        folder: A new folder for the process.
        timeout_seconds: Longest time that it may take.

    Raises:
        StageError: ``CANCELLED``, ``DISK_FULL``.
    """
    if "adapter" not in inputs:
        return {}
    spec = SurvivalSpec(
        base=inputs["base"].absolute(),
        adapter=inputs["adapter"].absolute(),
        outputs={name: inputs[name].absolute() for name in inputs if name not in NOT_OUTPUTS},
    )
    with process.start_runner(
        Spec(survival=spec), folder, ctx, label="stored weights", timeout_seconds=timeout_seconds
    ):
        pass
    try:
        found = read_json_object(folder / SURVIVAL_FILE, largest=LARGEST_LIST)
    except (OSError, ValueError):
        return dict.fromkeys(spec.outputs, AdapterSurvival(not_run="the process that compared them ended early"))
    return {name: AdapterSurvival.model_validate(each) for name, each in found.items()}

"""Compare the weights that the outputs store with base and adapter, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.formats.registry import format_of_output
from slipway.stage import Context
from slipway.validation.inputs import NOT_OUTPUTS, input_of, output_of
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
    names = [output_of(name) for name in inputs if name not in NOT_OUTPUTS]
    spec = SurvivalSpec(
        base=inputs["base"].absolute(),
        adapter=inputs["adapter"].absolute(),
        outputs={name: inputs[input_of(name)].absolute() for name in names if not _stands_beside(name)},
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


def _stands_beside(name: str) -> bool:
    """Return whether an output's format delivers the adapter beside the base's weights, which then hold nothing of it."""
    known = format_of_output(name)
    return known is not None and known.runtime is not None and known.runtime.on_base

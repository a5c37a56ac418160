"""Compare the weights that the outputs store with base and adapter, in the process that times the reference, or one of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.proof.precision import stored_dtype
from slipway.stage import Context
from slipway.validation.inputs import NOT_OUTPUTS, input_of, output_of
from slipway.validation.survival import AdapterSurvival
from slipway.validation.verdicts import Limits
from slipway_validate.by_layers import LONGER
from slipway_validate.folders import has_separate_adapter
from slipway_validate.judging.distances import level_of
from slipway_validate.judging.yardsticks import Measured, ReferenceRun, read_measured
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import SURVIVAL_FILE, YARDSTICKS_FILE, Spec, SurvivalSpec, Yardsticks


def survival_spec(inputs: Mapping[str, Path], limits: Mapping[str, Limits]) -> SurvivalSpec | None:
    """Return what is compared in a validation with these inputs and limits by level; None without an adapter."""
    if "adapter" not in inputs:
        return None
    names = [output_of(name) for name in inputs if name not in NOT_OUTPUTS]
    outputs = {name: inputs[input_of(name)].absolute() for name in names if not has_separate_adapter(name)}
    largest = {name: limits[level_of(stored_dtype(folder))].module_weight_error for name, folder in outputs.items()}
    return SurvivalSpec(
        base=inputs["base"].absolute(),
        adapter=inputs["adapter"].absolute(),
        outputs=outputs,
        largest_errors={name: limit for name, limit in largest.items() if limit is not None},
    )


class StoredWeights:
    """Compares the stored weights of outputs with base and adapter.

    Args:
        spec: What is compared; None for nothing.
        ctx: The stage's context.
        folder: A new folder for a process that compares them.
        timeout_seconds: Longest time that it may take.
        beside: The process that compares them beside the first output, and its folder. If there is none, or it ends early, they are
            compared in a process of their own when they are asked for.
        yardsticks: Passes with which outputs are measured, computed in the same process; None for none.
        reference: The reference's run, with which the passes are compared.
    """

    def __init__(
        self,
        spec: SurvivalSpec | None,
        ctx: Context,
        *,
        folder: Path,
        timeout_seconds: float,
        beside: tuple[process.Runner, Path] | None = None,
        yardsticks: Yardsticks | None = None,
        reference: ReferenceRun | None = None,
    ) -> None:
        self._reference = reference
        self._spec = spec
        self._yardsticks = yardsticks
        self._ctx = ctx
        self._folder = folder
        self._timeout_seconds = timeout_seconds
        self._beside = beside

    @cached_property
    def survival(self) -> dict[str, AdapterSurvival]:
        """Return the findings by the output's name; empty without an adapter. The first call waits for them.

        Raises:
            StageError: ``CANCELLED``, ``DISK_FULL``.
        """
        if self._spec is None:
            return {}
        why = "the process that compared them ended early"
        return _read_survival(self._files) or dict.fromkeys(self._spec.outputs, AdapterSurvival(not_run=why))

    @cached_property
    def measured(self) -> Measured:
        """Return the results of the passes. The first call waits for them.

        Raises:
            StageError: ``CANCELLED``, ``DISK_FULL``.
        """
        return Measured() if self._yardsticks is None else read_measured(self._files, self._yardsticks, self._reference)

    @cached_property
    def _files(self) -> Path:
        """Wait for the process, or run one, and return its folder."""
        wanted = [SURVIVAL_FILE] * (self._spec is not None) + [YARDSTICKS_FILE] * (self._yardsticks is not None)
        if self._beside is not None:
            runner, folder = self._beside
            _ = runner.result  # wait until the process has compared
            if all((folder / name).is_file() for name in wanted):
                return folder
        if wanted:
            by_layers = self._yardsticks is not None and self._yardsticks.by_layers
            label, timeout = "stored weights", self._timeout_seconds * (LONGER if by_layers else 1)
            spec = Spec(survival=self._spec, yardsticks=self._yardsticks)
            process.run(spec, self._folder, self._ctx, label=label, timeout_seconds=timeout)
        return self._folder


def _read_survival(folder: Path) -> dict[str, AdapterSurvival] | None:
    try:
        findings = read_json_object(folder / SURVIVAL_FILE, largest=LARGEST_LIST)
    except (OSError, ValueError):
        return None
    return {name: AdapterSurvival.model_validate(each) for name, each in findings.items()}

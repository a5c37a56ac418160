"""A call of a stage: one value, passed from the plan through an offer, a lease and a worker to the process that runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic

from slipway.division import step_of
from slipway.errors import ConfigurationError
from slipway.stage import Stage, StageParams
from slipway.texts import quoted

_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that one attempt of a call may use; 0 leaves the choice to the machine that runs it.

    Attributes:
        timeout_seconds: Longest run; 0 for no limit, on that machine too.
        max_memory_bytes: Anonymous memory that it should stay below.
        threads: Number of threads of numeric libraries.
    """

    timeout_seconds: float = 0.0
    max_memory_bytes: int = 0
    threads: int = 0

    def with_defaults(self, *, max_memory_bytes: int, threads: int) -> Limits:
        """Return the same limits, with these values for those left open."""
        memory = self.max_memory_bytes or max_memory_bytes
        return replace(self, max_memory_bytes=memory, threads=self.threads or threads)


@dataclass(frozen=True, slots=True)
class StageCall:
    """A stage with its parameters, inputs and limits.

    Attributes:
        stage: Installed name, or ``module:ATTRIBUTE``.
        params: JSON-ready parameters for the stage's model; the others take their defaults there.
        inputs: Source of each input by name: a reference in a plan (:mod:`slipway.planning.references`), an artifact's digest in an
            offer or lease, a folder on the machine that runs it.
        limits: Limits of one attempt.
    """

    stage: str
    params: Mapping[str, Any]
    inputs: Mapping[str, str]
    limits: Limits = Limits()

    def with_defaults(self, *, max_memory_bytes: int, threads: int) -> StageCall:
        """Return the same call, with these values for the limits that it leaves open."""
        return replace(self, limits=self.limits.with_defaults(max_memory_bytes=max_memory_bytes, threads=threads))

    def on_folders(self, inputs: Mapping[str, Path]) -> StageCall:
        """Return the same call on the folders that hold its inputs."""
        return replace(self, inputs={name: str(path.absolute()) for name, path in sorted(inputs.items())})

    def step(self, stage: Stage[Any]) -> Stage[Any]:
        """Return the stage as this call runs it: whole, or as one of the tasks that it is divided into."""
        return step_of(stage, self.params)

    def check(self, stage: Stage[Any]) -> StageParams:
        """Check inputs and parameters against the stage before any work; return the parameters as the stage's own type.

        Args:
            stage: The stage as the call runs it (:meth:`step`).

        Raises:
            ConfigurationError: ``PARAMS_INVALID`` or ``INPUT_MISSING``.
        """
        missing = sorted(set(stage.inputs) - set(self.inputs))
        known = (*stage.inputs, *stage.optional_inputs)
        unknown = [] if stage.more_inputs else sorted(set(self.inputs) - set(known))
        if missing or unknown:
            problem = f"lacks {', '.join(missing)}" if missing else f"does not know {', '.join(unknown)}"
            raise ConfigurationError(
                f"the stage {stage.name} {problem}",
                reason="INPUT_MISSING",
                remedy=f"its inputs are {', '.join(known)}",
                about={"stage": stage.name},
            )
        return self.params_of(stage)

    def params_of(self, stage: Stage[Any]) -> StageParams:
        """Return the parameters as the stage's own type.

        Raises:
            ConfigurationError: ``PARAMS_INVALID``.
        """
        try:
            return stage.params.model_validate_json(json.dumps(dict(self.params)))
        except pydantic.ValidationError as error:
            details = error.errors(include_url=False)[:_MOST_PROBLEMS]
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']} (is {quoted(e['input'])})" for e in details
            )
            raise ConfigurationError(
                f"parameters of {stage.name} are not valid: {problems}",
                reason="PARAMS_INVALID",
                remedy=f"it takes {', '.join(stage.params.model_fields)}",
                about={"stage": stage.name},
            ) from error

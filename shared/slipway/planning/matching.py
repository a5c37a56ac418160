"""Decide which workers may take a task. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slipway.requirements import ANY, Abilities, Requirements
from slipway.sizes import format_size


class Placement(NamedTuple):
    """The workers that an offer is for.

    Attributes:
        stage: Stage of the task.
        requirements: Requirements for workers.
        avoid: Names of workers that take the task only if no other worker can.
        parameters: Names of the parameters that a worker's version of the stage must know.
    """

    stage: str
    requirements: Requirements = ANY
    avoid: tuple[str, ...] = ()
    parameters: frozenset[str] = frozenset()

    def can(self, worker: Abilities) -> bool:
        """Return whether a worker is able to run the task."""
        return (
            self.stage in worker.stages
            and self.requirements.met_by(worker)
            and not worker.unknown(self.stage, self.parameters)
        )

    def candidates(self, known: Mapping[str, Abilities]) -> set[str]:
        """Return the names of the workers that the offer waits for.

        They are the workers that can run it, without those to avoid and reduced to the preferred ones, unless none would be left.
        """
        names = {name for name, worker in known.items() if self.can(worker)}
        names = names - set(self.avoid) or names
        for needs in self.requirements.prefers:
            names = {name for name in names if needs.met_by(known[name])} or names
        return names

    def lacking(self, workers: Iterable[Abilities]) -> str:
        """Say why no worker takes the task, with the needs of the task and the abilities of the workers."""
        serving = [worker for worker in workers if self.stage in worker.stages]
        if not serving:
            return f"no worker runs the stage {self.stage}"
        able = sum(self.can(worker) for worker in serving)
        if able:
            return f"the workers that can run {self.stage} ({able}) take no new tasks: they are shutting down, or their disks are full"
        fitting = [worker for worker in serving if self.requirements.met_by(worker)]
        unknown = sorted(set[str]().union(*(worker.unknown(self.stage, self.parameters) for worker in fitting)))
        if fitting:
            names = ", ".join(unknown)
            return (
                f"the workers that run {self.stage} ({len(fitting)}) are of another version: they do not know {names}"
            )
        needs = " or ".join(str(needs) for needs in self.requirements.any_of)
        have = "; ".join(sorted({self._has(worker) for worker in serving}))
        return f"{self.stage} needs {needs}; its workers ({len(serving)}) have {have}"

    def _has(self, worker: Abilities) -> str:
        asked = self.requirements.any_of
        parts = [worker.gpu_architecture or "no GPU"]
        if any(needs.gpu_memory_bytes for needs in asked):
            parts.append(f"{format_size(worker.gpu_memory_bytes)} of GPU memory")
        if any(needs.memory_bytes for needs in asked):
            parts.append(f"{format_size(worker.memory_bytes)} of memory for a task")
        for name in sorted({name for needs in asked for name in needs.libraries}):
            version = worker.libraries.get(name)
            parts.append(f"{name} {version}" if version else f"no {name}")
        return ", ".join(parts)

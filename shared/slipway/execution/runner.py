"""Run one task, from digests of inputs to digests of outputs: reuse a stored result, or fetch the inputs, run the stage, store its outputs."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from slipway.artifacts import ActionResult, ArtifactStore, LocalStore, action_key
from slipway.artifacts.adopting import adopted_files
from slipway.artifacts.opening import cache_of
from slipway.errors import Failure, ModelExportError
from slipway.execution.execution import Execution
from slipway.execution.failures import failure_of, with_named_places, with_surroundings
from slipway.execution.memory_curve import MemoryOverTime
from slipway.execution.supervisor import OnLog, OnProgress, execute
from slipway.execution.transfers import transfer
from slipway.files.paths import user_path
from slipway.files.work_folders import MEMORY, UNUSED_SECONDS, kept_folder, remove_abandoned, remove_unused, unfinished
from slipway.observability import metrics
from slipway.observability.telemetry import current_traceparent
from slipway.registry import IMPORT, load_stage
from slipway.settings.stage_environment import without_current_folder
from slipway.stage import Keeps, Progress, Stage
from slipway.stage_call import StageCall

log = logging.getLogger("slipway.execution")


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task: the digest of each output by name and the facts, or a failure."""

    outputs: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    reused: bool = False
    failure: Failure | None = None
    peak_memory_bytes: int = 0
    memory: MemoryOverTime = field(default_factory=MemoryOverTime)


class _Used(TypedDict):
    """Memory that a task's processes used."""

    peak_memory_bytes: int
    memory: MemoryOverTime


class TaskRunner:
    """Runs tasks against one store. Each task has a work folder below ``scratch``, which is removed when the task ends.

    Args:
        store: Store of inputs and outputs.
        scratch: Folder for work folders; best on the store's file system, so that storing an output does not copy it.
        gpu_architecture: GPU architecture of this machine, for stages whose output depends on it.
    """

    def __init__(self, store: ArtifactStore, scratch: Path, *, gpu_architecture: str = "") -> None:
        self._store = store
        self._gpu_architecture = gpu_architecture
        scratch.mkdir(parents=True, exist_ok=True)
        self.scratch = scratch.resolve()
        remove_abandoned(self.scratch)
        remove_unused(self.scratch, seconds=UNUSED_SECONDS)

    def using_store(self) -> AbstractContextManager[None]:
        """Protect a task's inputs and outputs in the store from removal, from before it runs until its result is recorded."""
        return self._store.using()

    @property
    def cache(self) -> LocalStore | None:
        """The cache of the store on this machine; None for a store without one."""
        return cache_of(self._store)

    async def run(
        self,
        call: StageCall,
        *,
        project: str = "",
        on_progress: OnProgress = lambda progress, memory: None,  # noqa: ARG005
        on_log: OnLog = lambda level, message: None,  # noqa: ARG005
    ) -> TaskResult:
        """Run one task; never raise because of the task. Cancelling ends its processes and removes its work folder.

        Args:
            call: The stage with its parameters; inputs are artifacts by digest.
            project: Project of the export, for which sources are imported.
            on_progress: As for :func:`~slipway.execution.supervisor.execute`.
            on_log: As for :func:`~slipway.execution.supervisor.execute`.
        """
        try:
            stage = call.step(load_stage(call.stage))
            params = call.check(stage)
            if call.stage == IMPORT:
                return await self._import(call, project, on_progress=on_progress, on_log=on_log)
            key = action_key(stage, call.inputs, params, gpu_architecture=self._gpu_architecture)
            recorded = await asyncio.to_thread(self._store.action, key)
            metrics.CACHE.add(stage=call.stage, result="miss" if recorded is None else "hit")
            if recorded is not None:
                return TaskResult(outputs=recorded.outputs, facts=recorded.facts, reused=True)
            place = {Keeps.PIECES: key, Keeps.MEMORY: MEMORY}.get(stage.keeps, "")
            keeping = kept_folder(self.scratch, stage.name, place) if place else nullcontext()
            with keeping as kept, unfinished(self.scratch / stage.name) as folder:
                result = await self._execute(
                    call, stage, key, folder, kept=kept, on_progress=on_progress, on_log=on_log
                )
                if kept is not None and stage.keeps is Keeps.PIECES and not _can_be_continued(result.failure):
                    shutil.rmtree(kept, ignore_errors=True)
                return result
        except Exception as error:  # a stage's module and the checks of its parameters are its author's code
            if not isinstance(error, ModelExportError | OSError):
                log.exception(f"{call.stage} failed before its process began")
            return TaskResult(failure=with_surroundings(failure_of(error, stage=call.stage), **self._folders()))

    async def _import(self, call: StageCall, project: str, *, on_progress: OnProgress, on_log: OnLog) -> TaskResult:
        """Import sources into the store. No result is looked up, because an address does not identify content: the stage itself skips known files."""
        with unfinished(self.scratch / IMPORT) as folder:
            params = {**call.params, "brought": sorted(call.inputs.values()), "project": project}
            environment = _environment_for_import()
            execution = Execution(
                replace(call, params=params, inputs={}),
                folder,
                traceparent=current_traceparent(),
                environment=environment,
            )
            outcome = await execute(execution, on_progress=on_progress, on_log=on_log)
        used: _Used = {"peak_memory_bytes": outcome.peak_memory_bytes, "memory": outcome.memory}
        if outcome.failure is not None:
            return TaskResult(failure=with_surroundings(outcome.failure, **self._folders()), **used)
        digests = {str(name): str(digest) for name, digest in outcome.facts.pop("digests", {}).items()}
        reused = not outcome.facts.get("read_bytes")
        return TaskResult(outputs=digests, facts=outcome.facts, reused=reused, **used)

    def _folders(self) -> dict[str, Path]:
        """Return the folders in which a task uses disk space on this machine."""
        store = {"store": self._store.root} if isinstance(self._store, LocalStore) else {}
        return {"scratch": self.scratch, **store}

    async def _execute(
        self,
        call: StageCall,
        stage: Stage[Any],
        key: str,
        folder: Path,
        *,
        kept: Path | None,
        on_progress: OnProgress,
        on_log: OnLog,
    ) -> TaskResult:
        fetch = partial(self._store.fetch, leave_out=stage.adopts)
        asked = {name: partial(fetch, digest, folder / "inputs" / name) for name, digest in sorted(call.inputs.items())}
        inputs = await transfer("fetched", asked, stage=call.stage, on_progress=on_progress)
        workdir = folder / "work"
        workdir.mkdir()
        execution = Execution(
            call.on_folders(inputs),
            workdir,
            kept=kept,
            input_digests=dict(sorted(call.inputs.items())),
            traceparent=current_traceparent(),
        )
        # Shown until the stage reports progress itself, some time after its libraries are imported.
        on_progress(Progress(phase="starting", done=0, total=0, unit=""), 0)
        outcome = await execute(execution, on_progress=on_progress, on_log=on_log)
        used: _Used = {"peak_memory_bytes": outcome.peak_memory_bytes, "memory": outcome.memory}
        if outcome.failure is not None:
            named = with_named_places(outcome.failure, inputs=inputs, workdir=workdir)
            return TaskResult(failure=with_surroundings(named, **self._folders()), **used)
        outputs: dict[str, str] = {}
        main = stage.main_output if stage.outputs else ""
        adopted = await asyncio.to_thread(adopted_files, self._store, call.inputs, outcome.adopted)
        for name, path in sorted(outcome.outputs.items()):
            put = partial(self._store.put, path, known=outcome.digests, adopted=adopted if name == main else ())
            outputs |= await transfer("stored", {name: put}, stage=call.stage, on_progress=on_progress)
        result = ActionResult(outputs=outputs, facts=outcome.facts)
        await asyncio.to_thread(self._store.record_action, key, result)
        return TaskResult(outputs=outputs, facts=outcome.facts, **used)


def _environment_for_import() -> dict[str, str]:
    """Return this process's environment for a child in another folder, with absolute paths."""
    environment = without_current_folder(os.environ)
    for name in ("SLIPWAY_HOME", "SLIPWAY_STORE", "SLIPWAY_SCRATCH"):
        place = environment.get(name, "")
        if place and "://" not in place:
            environment[name] = str(user_path(place).absolute())
    return environment


def _can_be_continued(failure: Failure | None) -> bool:
    """Return whether an attempt was interrupted, so that the next one of the same action may continue from its kept files."""
    return failure is not None and (failure.retryable or failure.reason == "CANCELLED")

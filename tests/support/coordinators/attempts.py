"""The attempts that follow failures of a task, by the rules of the table."""

from __future__ import annotations

import itertools
from typing import Any

from slipway.errors import Failure
from slipway_coordinator.lifecycle.records import AttemptRecord, TaskState
from slipway_coordinator.lifecycle.recovery import NextAttempt, recover
from slipway_coordinator.lifecycle.rules import Profile

START: dict[str, dict[str, Any]] = {
    "onnx_export": {"engine": "auto", "opset": None},
    "executorch": {"level": "8da4w", "group_size": 128},
    "gguf": {"type": "q4_0"},
    "torchscript": {"level": "none", "optimize": True},
    "torch_export": {"level": "none", "aot": True},
    "quantize": {"format": "onnx", "level": "int4", "group_size": 128},
}


def failure(reason: str, **about: str) -> Failure:
    return Failure(reason=reason, message="it failed", about=about)


def chain(
    stage: str,
    reasons: list[str],
    profile: Profile,
    params: dict[str, Any],
    limit: int = 10,
    *,
    alone: bool = False,
    about: dict[str, str] | None = None,
    reserve: tuple[str, ...] = (),
) -> list[NextAttempt]:
    """The attempts that follow when attempts fail with these reasons, the last one for ever.

    Failures of the ONNX export name their engine, unless ``about`` is empty.
    """
    history = [AttemptRecord(number=1, state=TaskState.FAILED, params=params)]
    following: list[NextAttempt] = []
    for reason in itertools.chain(reasons, itertools.repeat(reasons[-1])):
        quantized = {"group_size": str(history[-1].params.get("group_size")), "modules": "layers.0.q_proj"}
        said = quantized if stage == "quantize" else dict(about or {})
        if stage == "onnx_export" and about:
            engine = history[-1].params["engine"]
            said["engine"] = "mobius" if engine == "auto" else engine
        history[-1] = history[-1].model_copy(update={"failure": failure(reason, **said)})
        found = recover(
            failure(reason, **said),
            stage,
            params=history[-1].params,
            history=history,
            profile=profile,
            facts={},
            max_attempts=limit,
            alone=alone,
            reserve=reserve,
            delivers=lambda level: f"pytorch-{level}",
        )
        if found is None:
            return following
        following.append(found)
        history.append(
            AttemptRecord(
                number=len(history) + 1,
                state=TaskState.FAILED,
                params=found.params,
                resources=found.resources,
                rule=found.rule,
            )
        )
    raise AssertionError


def names(attempts: list[NextAttempt]) -> list[str]:
    return [attempt.rule for attempt in attempts]

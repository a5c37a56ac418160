"""The request that a format plans for, and the tasks that it returns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from slipway.formats.settings import FormatSettings, LevelSettings
from slipway.levels import LEVELS, widths_of
from slipway.registry import known_stage, stage_of
from slipway.requirements import ANY, Requirements
from slipway.stage import Role, Stage, StageParams
from slipway.stage_call import StageCall
from slipway.texts import file_name

S = TypeVar("S", bound=FormatSettings)
L = TypeVar("L", bound=LevelSettings)


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """One run of one stage.

    Attributes:
        id: Unique within the export.
        stage: Name of the stage.
        params: Parameters for the stage's model; the others take their defaults there.
        inputs: Source of each input, by input name: ``source:NAME`` or ``task:ID/OUTPUT``.
        format: Name of the output that the task delivers; empty for an intermediate result.
        partial: Whether the task runs with the inputs whose tasks succeeded, instead of needing all of them.
        requirements: Requirements for workers.
        output: Name of the task's only output.
        open: Parameters that neither the settings nor a profile chose: a precedent may decide them (:mod:`slipway.planning.precedents`).
        fallback: What happens instead if the task fails, for people; the tasks that use its output then run without it, and the
            export can succeed. Empty: they need it.
        reserve: Source of further inputs, by input name, that a rule of recovery may give the task. Tasks that make them for no other
            purpose do not run before that.
    """

    id: str
    stage: str
    params: Mapping[str, Any]
    inputs: Mapping[str, str]
    format: str = ""
    partial: bool = False
    requirements: Requirements = ANY
    output: str = ""
    open: tuple[str, ...] = ()
    fallback: str = ""
    reserve: Mapping[str, str] = field(default_factory=dict)

    @property
    def call(self) -> StageCall:
        """Return the call of the stage."""
        return StageCall(self.stage, self.params, self.inputs)

    def known(self) -> tuple[Stage[Any], StageParams] | None:
        """Return the stage as the task runs it, and the task's parameters.

        None if the stage is not installed here, such as a plug-in of another machine, or refuses the parameters; the preflight says so.
        """
        known = known_stage(self.stage)
        try:
            stage = known and self.call.step(known)
            return None if stage is None else (stage, self.call.params_of(stage))
        except Exception:  # noqa: BLE001 - the checks of parameters are the code of the stage's author
            return None

    @property
    def reference(self) -> str:
        """Return the reference by which another task's input names the output."""
        return f"task:{self.id}/{self.output}"


@dataclass(frozen=True, slots=True)
class FormatRequest(Generic[S]):
    """A request to a format to plan its tasks.

    Attributes:
        name: The format's name, with which the names of its outputs begin: ``NAME`` unquantized, ``NAME-LEVEL`` at a level.
        settings: Its section of the configuration.
        levels: Requested quantization levels; the format has all of them.
        model: Reference to the merged model.
        base: Reference to the base model, in plain weights.
        adapter: Reference to the adapter, the combined one of several; empty if a model is exported as it is.
        group_size: Number of weights in a row that share one scale (``optimization.group_size``).
        packed: Whether integer weights are stored packed (``optimization.compress_weights``).
        profile: Caution of the attempts (``recovery.profile``), which may shape the first one too.
        widths: Parameters of the quantization stage that say which weights of a level of few bits get more (``optimization.size_budget``,
            ``wide_share``, ``head_bits``).
        calibrations: Reference to the calibration of each level that has one (``optimization.method``).
        reserves: The same for levels that get one only if their output fails validation.
        text: Reference to the text for levels that need or take it; empty if the export reads none.
        model_name: Name of the fine-tuned model as the settings have it, for names of files and metadata; empty if they name none.
        base_model: The base model's repository on a hub, such as ``Qwen/Qwen3-0.6B``; empty if the settings name none.
        shard_bytes: Largest weights file of a transformers folder (``execution.shard_bytes``); 0 leaves it to the stages.
    """

    name: str
    settings: S
    levels: tuple[str, ...]
    model: str
    base: str = ""
    adapter: str = ""
    group_size: int = 32
    packed: bool = True
    profile: str = "auto"
    widths: Mapping[str, int | float] = field(default_factory=dict)
    calibrations: Mapping[str, str] = field(default_factory=dict)
    reserves: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    model_name: str = ""
    base_model: str = ""
    shard_bytes: int = 0

    @property
    def file_name(self) -> str:
        """Return the fine-tuned model's name as the beginning of a file's name; ``model`` without one."""
        return file_name(self.model_name) or "model"


def one_per_level(
    request: FormatRequest[L],
    stage: str,
    inputs: Mapping[str, str],
    params: Callable[[str], Mapping[str, Any]],
    *,
    requirements: Requirements = ANY,
) -> tuple[PlannedTask, ...]:
    """Plan a task of a stage for every requested level, and one for the unquantized output if it is requested.

    Args:
        request: The request to the format.
        stage: The stage, whose output has its name.
        inputs: Source of each input.
        params: Return the stage's parameters for a level; ``none`` for the unquantized output.
        requirements: Requirements for workers.
    """
    levels = (*(("none",) if request.settings.unquantized else ()), *request.levels)
    names = {level: request.name if level == "none" else f"{request.name}-{level}" for level in levels}
    return tuple(
        PlannedTask(
            id=name,
            stage=stage,
            params=params(level),
            inputs=inputs,
            format=name,
            requirements=requirements,
            output=stage,
        )
        for level, name in names.items()
    )


def quantized(request: FormatRequest[Any], source: str) -> tuple[PlannedTask, ...]:
    """Plan a task of the quantization stage for every requested level.

    Args:
        request: The request to the format; the stage uses the format's :attr:`~slipway.formats.Quantization.quantizer`.
        source: Reference to the format's unquantized output.
    """
    stage = stage_of(Role.QUANTIZATION)
    return tuple(
        PlannedTask(
            id=f"{stage.name}-{request.name}-{level}",
            stage=stage.name,
            params={
                "format": request.name,
                "level": level,
                "group_size": request.group_size,
                "packed": request.packed,
                **(request.widths if len(widths_of(level)) > 1 else {}),
            },
            inputs={"model": source, **_calibration(request.calibrations, level), **_text(request, level)},
            reserve=_calibration(request.reserves, level),
            format=f"{request.name}-{level}",
            output=stage.main_output,
        )
        for level in request.levels
    )


def _calibration(references: Mapping[str, str], level: str) -> dict[str, str]:
    return {"calibration": references[level]} if level in references else {}


def _text(request: FormatRequest[Any], level: str) -> dict[str, str]:
    known = LEVELS.get(level)
    wanted = known is not None and (known.needs_text or known.takes_text)
    return {"data": request.text} if request.text and wanted else {}

"""What a format is asked to plan, and the tasks it answers with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from slipway.formats.settings import FormatSettings
from slipway.registry import stage_of
from slipway.requirements import ANY, Requirements
from slipway.stage import Role

S = TypeVar("S", bound=FormatSettings)


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """One run of one stage.

    Attributes:
        id: Unique within the export.
        stage: Name of the stage.
        params: Parameters for the stage's model; what is not named takes its default there.
        inputs: Where each input comes from, by input name: ``source:NAME`` or ``task:ID/OUTPUT``.
        format: Format the task delivers; empty for an intermediate result.
        partial: Whether the task runs over those of its task inputs that succeeded, instead of needing them all.
        requirements: Which workers it is for.
        output: Name of the one output that it gives.
    """

    id: str
    stage: str
    params: Mapping[str, Any]
    inputs: Mapping[str, str]
    format: str = ""
    partial: bool = False
    requirements: Requirements = ANY
    output: str = ""

    @property
    def reference(self) -> str:
        """The output, as an input of another task names it."""
        return f"task:{self.id}/{self.output}"


@dataclass(frozen=True, slots=True)
class FormatRequest(Generic[S]):
    """What a format is asked for.

    Attributes:
        name: The format's name, which its outputs begin with: ``NAME`` unquantized, ``NAME-LEVEL`` at a level.
        settings: Its section of the configuration.
        levels: Quantization levels asked for, all of them the format's own.
        model: Reference to the merged model.
        group_size: Weights that share one scale, counted along a row (``optimization.group_size``).
        packed: Whether integer weights are stored packed (``optimization.compress_weights``).
    """

    name: str
    settings: S
    levels: tuple[str, ...]
    model: str
    group_size: int = 32
    packed: bool = True


def quantized(request: FormatRequest[Any], source: str) -> tuple[PlannedTask, ...]:
    """Plan every level that is asked for with the installed stage that quantizes.

    Args:
        request: What the format was asked for; the stage writes what :attr:`~slipway.formats.Format.quantizer` names.
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
            },
            inputs={stage.inputs[0]: source},
            format=f"{request.name}-{level}",
            output=stage.main_output,
        )
        for level in request.levels
    )

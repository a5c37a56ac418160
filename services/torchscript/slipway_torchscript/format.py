"""The formats ``torchscript`` and ``torch_export``: graphs of PyTorch itself, for programs in C++ and for Python without transformers."""

from __future__ import annotations

from typing import Literal

from slipway.formats import (
    Fit,
    Format,
    FormatRequest,
    LevelSettings,
    Needs,
    PlannedTask,
    Quantization,
    RefusedLevel,
    Requirements,
    Runtime,
    Usage,
    one_per_level,
)
from slipway.model.families import FAMILIES, TEXT_FAMILIES
from slipway_torchscript import params
from slipway_torchscript.params import DESCRIPTIONS, PROGRAM, SCRIPT

_INTEGERS = "its weights would be integers, of which no graph of PyTorch is made"
_REFUSED = {level: RefusedLevel(_INTEGERS, instead="bf16") for level in ("int8", "int4")}
_REQUIREMENTS = Requirements(any_of=(Needs(libraries=("torch", "transformers")),))
_FAMILIES = tuple(family.name for family in FAMILIES if family in TEXT_FAMILIES)


class TorchScriptConfiguration(LevelSettings):
    """A graph for libtorch and ``torch.jit.load`` (``model.pt``), frozen.

    Attributes:
        control_flow: Where the model's code branches on values: ``trace`` refuses the model; ``script`` compiles the module that branches, or
            else does as ``prove``; ``prove`` keeps the trace if the comparison at other shapes shows no difference. If not set, a trace that would
            lose a branch is followed by ``script``.
        optimize: Rewrite the graph for inference on CPUs (``torch.jit.optimize_for_inference``). Such a graph runs on no other device.
    """

    control_flow: Literal["trace", "script", "prove"] | None = None
    optimize: bool = False


class TorchExportConfiguration(LevelSettings):
    """A program of ``torch.export`` (``model.pt2``), the successor of TorchScript.

    Attributes:
        aot: Also compile it for the CPU of the worker (``model.aoti.pt2``), if that has a C++ compiler.
    """

    aot: bool = False


def plan_torchscript(request: FormatRequest[TorchScriptConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan one task for each level, and one for the float32 graph if it is requested."""
    settings = request.settings
    flow = {"control_flow": settings.control_flow} if settings.control_flow else {}
    return one_per_level(
        request,
        "torchscript",
        {"pytorch": request.model},
        lambda level: {"level": level, "optimize": settings.optimize, **flow},
        requirements=_REQUIREMENTS,
    )


def plan_torch_export(request: FormatRequest[TorchExportConfiguration]) -> tuple[PlannedTask, ...]:
    """Plan one task for each level, and one for the float32 program if it is requested."""
    aot = request.settings.aot
    return one_per_level(
        request,
        "torch_export",
        {"pytorch": request.model},
        lambda level: {"level": level, "aot": aot},
        requirements=_REQUIREMENTS,
    )


TORCHSCRIPT = Format(
    name="torchscript",
    title="TorchScript",
    settings=TorchScriptConfiguration,
    plan=plan_torchscript,
    levels=tuple(params.LEVELS),
    quantization=Quantization(refused=_REFUSED),
    rank=30,
    output_bytes=lambda _, level, size: size.program_bytes(level),
    runtime=Runtime(
        name="torchscript",
        files=(SCRIPT,),
        load="slipway_torchscript.runtime:load_script",
        families=_FAMILIES,
        precision_file=DESCRIPTIONS[SCRIPT],
    ),
    usage=Usage(
        template=("slipway_torchscript", "usage.example.j2"),
        library="pytorch",
        packages="torch tokenizers",
        chat_packages="torch transformers jinja2",
    ),
    fits=(Fit("cpu-server", "libtorch runs the file from C++; torch calls the format deprecated", rank=50),),
    media_types={".pt": "application/vnd.pytorch.torchscript"},
)
TORCH_EXPORT = Format(
    name="torch_export",
    title="torch.export",
    settings=TorchExportConfiguration,
    plan=plan_torch_export,
    levels=tuple(params.LEVELS),
    quantization=Quantization(refused=_REFUSED),
    rank=31,
    # A compiled program has the weights once more.
    output_bytes=lambda settings, level, size: size.program_bytes(level) * (2 if settings.aot else 1),
    runtime=Runtime(
        name="torch.export",
        files=(PROGRAM,),
        load="slipway_torchscript.runtime:load_program",
        families=_FAMILIES,
        precision_file=DESCRIPTIONS[PROGRAM],
    ),
    usage=Usage(
        template=("slipway_torchscript", "usage_of_programs.example.j2"),
        library="pytorch",
        packages="torch tokenizers",
        chat_packages="torch transformers jinja2",
    ),
    fits=(Fit("cpu-server", "torch runs the program, or compiles it for its processor (aot)", rank=45),),
    media_types={".pt2": "application/vnd.pytorch.exported-program"},
)

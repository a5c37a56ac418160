"""The contract between Slipway and a stage: a plain function from input folders to output folders.

A stage package has one module, ``stage.py``, with its parameters, its ``run`` function and a :class:`Stage` value named
``STAGE``. It knows nothing of stores, services or tracing; the executor runs it in a child process of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from slipway.errors import StageError
from slipway.estimates import ModelSize

MOST_FACTS_BYTES = 256 << 10
"""Size of the facts of one result as they travel; lists in them are cut before (:func:`cut_lists`)."""

_MOST_ENTRIES = 300


class StageParams(BaseModel):
    """Base of every stage's parameters: frozen, strict, unknown fields refused, defaults checked."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)


P = TypeVar("P", bound=StageParams)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage is. ``total`` is 0 while unknown; ``unit`` is ``bytes``, ``tensors``, ``layers`` or the like."""

    phase: str
    done: int
    total: int
    unit: str


@dataclass
class Context:
    """What a running stage may use beside its inputs and parameters.

    Attributes:
        workdir: Empty folder of this attempt, and its process's current folder; outputs are written below it. Removed with the attempt.
        log: Logger of this attempt.
        max_memory_bytes: Anonymous memory the stage should stay below.
        threads: Threads that numeric libraries may use.
        kept: For a stage that is resumable: folder that survives between attempts of the same action (same inputs, parameters
            and versions) on this machine, on the file system of ``workdir``; None where there is none. An attempt leaves
            finished pieces there, best as hard links, and one after an interruption takes those it can verify. It goes with
            the action's result, or with a failure that repeating the attempt cannot help.
    """

    workdir: Path
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("slipway.stage"))
    max_memory_bytes: int = 4 << 30
    threads: int = 1
    kept: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    digests: dict[Path, str] = field(default_factory=dict)
    on_progress: Callable[[Progress], None] = lambda _: None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def progress(self, phase: str, *, done: int, total: int = 0, unit: str = "bytes") -> None:
        """Report progress, and stop here if the attempt was cancelled.

        Cheap enough to call once per tensor or sample; call it at least once a second where that is possible.

        Raises:
            StageError: reason ``CANCELLED``.
        """
        self.check_cancelled()
        self.on_progress(Progress(phase=phase, done=done, total=total, unit=unit))

    def check_cancelled(self) -> None:
        """Stop here if the attempt was cancelled.

        Raises:
            StageError: reason ``CANCELLED``.
        """
        if self.cancelled.is_set():
            raise StageError("the stage was cancelled", reason="CANCELLED")

    def record(self, **facts: Any) -> None:
        """Add JSON-ready facts about the result (sizes, norms, chosen engine); they travel with it into the report.

        Together they take :data:`MOST_FACTS_BYTES` at most. A long list is cut; what names every tensor of a model belongs into
        a file of the output.
        """
        self.facts.update(cut_lists(facts))

    def digest(self, path: Path, sha256: str) -> None:
        """Tell the SHA-256 (64 hexadecimal digits) of a finished output file, computed while it was written.

        The store then takes the file without reading it again; whoever reads it from there first finds out if it is wrong.
        """
        self.digests[path] = f"sha256:{sha256}"

    def warn(self, message: str) -> None:
        """Log a warning that the user will also find in the export's result."""
        self.log.warning(message)
        self.facts.setdefault("warnings", []).append(message)


@dataclass(frozen=True, slots=True)
class Provider:
    """A library or device a stage can work with, as ``slipway doctor`` shows it.

    Attributes:
        name: For example ``onnx``, ``tensorrt-rtx``.
        available: Whether it can be used on this machine now.
        version: Its version, empty when not installed.
        detail: What it gives when available, otherwise what is missing and how to get it.
    """

    name: str
    available: bool
    version: str = ""
    detail: str = ""


class Role(Enum):
    """A part that one stage plays in every export, beside what formats plan; the plan finds each by its role."""

    COMBINATION = auto()
    """Several adapters as one: from ``adapter`` and further inputs."""
    PREPARATION = auto()
    """A base model that is stored otherwise as plain safetensors: from ``base``."""
    MERGE = auto()
    """The merged model, which every format begins with: from ``base`` and ``adapter``."""
    QUANTIZATION = auto()
    """A format's output at a level: from the unquantized one."""
    VALIDATION = auto()
    """The judgement of every output: from ``base``, ``adapter``, perhaps ``heldout``, and the outputs by their names."""


@dataclass(frozen=True, slots=True)
class Effort:
    """About how long a stage takes beside others, and how far it is in each phase: what progress is shown by.

    Attributes:
        seconds: For any model. Only its ratio to other stages' counts.
        seconds_per_gb: More for each GB that it makes (or validates).
        phases: Where each phase lies within the stage, from 0 to 1, by the phase's first word.
    """

    seconds: float = 4.0
    seconds_per_gb: float = 0.0
    phases: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def _no_bytes(_params: Mapping[str, Any], _size: ModelSize) -> int:
    return 0


def _no_advice(_params: Mapping[str, Any]) -> tuple[str, str, str] | None:
    return None


def _nothing_refused(_config: Mapping[str, Any]) -> str:
    return ""


@dataclass(frozen=True)
class Stage(Generic[P]):
    """One kind of work: names, versions, and the function that does it.

    Attributes:
        name: Name on the command line, in plans and in reports.
        version: Raised whenever the same inputs and parameters give other output; part of the action key.
        inputs: Names of the input folders, all required.
        outputs: Names of the output folders, the main one first.
        params: The stage's parameters.
        run: ``run(inputs, params, ctx) -> {output name: folder below ctx.workdir}``. It may raise any
            :class:`~slipway.errors.ModelExportError`; whatever else it raises is reported as ``STAGE_ERROR``.
        libraries: Distributions whose versions shape the output; part of the action key.
        more_inputs: Whether inputs with other names are taken too (validate takes every output by its format's name).
        device_bound: Whether the output depends on the GPU's architecture; it is then part of the action key.
        resumable: Whether an attempt goes on with what an interrupted one left in :attr:`Context.kept`.
        probe: What this machine offers the stage. Looks at installed metadata only; imports nothing heavy.
        alternatives: Whether any one of its providers will do; otherwise it needs them all.
        role: The part it plays in every export; None for one that only formats plan.
        effort: How long it takes beside others.
        output_bytes: Size of the output for these parameters and a model of this size, estimated from above.
        advice: What is known of these parameters before anything runs: a check's name, what will come, and a remedy; None for nothing.
        refuses: Says why no model with this ``config.json`` is taken; empty for one that is.
        model_memory: Memory a worker should have, as a multiple of the merged model's size; 0 for a stage that streams.
        model_gpu_memory: The same of the GPU's memory, where the task needs a GPU.
        gpu_bound_output: Whether the output runs only on the GPU architectures that its fact ``targets`` names.
    """

    name: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: type[P]
    run: Callable[[Mapping[str, Path], P, Context], dict[str, Path]]
    libraries: tuple[str, ...] = ()
    more_inputs: bool = False
    device_bound: bool = False
    resumable: bool = False
    probe: Callable[[], tuple[Provider, ...]] | None = None
    alternatives: bool = False
    role: Role | None = None
    effort: Effort = Effort()
    output_bytes: Callable[[Mapping[str, Any], ModelSize], int] = _no_bytes
    advice: Callable[[Mapping[str, Any]], tuple[str, str, str] | None] = _no_advice
    refuses: Callable[[Mapping[str, Any]], str] = _nothing_refused
    model_memory: float = 0.0
    model_gpu_memory: float = 0.0
    gpu_bound_output: bool = False

    @property
    def main_output(self) -> str:
        """Name of the output that later tasks take."""
        return self.outputs[0]

    def library_versions(self) -> dict[str, str]:
        """Installed versions of :attr:`libraries`; empty for one that is not installed."""
        return {name: installed_version(name) for name in self.libraries}

    def providers(self) -> tuple[Provider, ...]:
        """What this machine offers the stage; by default, its libraries."""
        if self.probe is not None:
            return self.probe()
        return tuple(library_provider(name) for name in self.libraries)


def cut_lists(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts with at most 300 entries of each list, and beside one that was longer ``NAME_left_out``, how many are missing.

    Models of many experts have tens of thousands of tensors.
    """
    cut: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            cut[name] = cut_lists(value)
        elif isinstance(value, list | tuple) and len(value) > _MOST_ENTRIES:
            cut[name] = list(value[:_MOST_ENTRIES])
            cut[f"{name}_left_out"] = len(value) - _MOST_ENTRIES
        else:
            cut[name] = value
    return cut


def installed_version(distribution: str) -> str:
    """Version of an installed distribution, or an empty string."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def library_provider(distribution: str) -> Provider:
    """A distribution as a provider that is available when installed."""
    found = installed_version(distribution)
    detail = "" if found else f"pip install {distribution}"
    return Provider(name=distribution, available=bool(found), version=found, detail=detail)

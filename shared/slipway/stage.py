"""The contract between Slipway and a stage: a plain function from input folders to output folders.

A stage package has one module, ``stage.py``, with its ``run`` function and a :class:`Stage` value named ``STAGE``; its parameters
are there or in ``params.py``. It knows nothing about stores, services or tracing. The executor runs it in its own child process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from slipway.distribution import installed_version
from slipway.errors import StageError
from slipway.parts import Adopted, Part
from slipway.sizes import ModelSize

MOST_FACTS_BYTES = 256 << 10
"""Largest size of a result's facts when they are sent; long lists are cut before (:func:`cut_lists`)."""

_MOST_ENTRIES = 300


class StageParams(BaseModel):
    """Base of every stage's parameters: frozen and strict; unknown fields are refused and defaults checked."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True, defer_build=True)


P = TypeVar("P", bound=StageParams)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a stage. ``total`` is 0 while unknown; ``unit`` is ``bytes``, ``tensors``, ``layers`` or the like."""

    phase: str
    done: int
    total: int
    unit: str


@dataclass
class Context:
    """What a running stage gets besides its inputs and parameters.

    Attributes:
        workdir: Empty folder of this attempt, and its process's current folder; outputs are written below it. It is removed at the
            end of the attempt.
        log: Logger of this attempt.
        max_memory_bytes: Anonymous memory that the stage should stay below.
        threads: Number of threads that numeric libraries may use.
        kept: For a stage that keeps pieces: folder that survives between attempts of the same action (same inputs, parameters and
            versions) on this machine, on the file system of ``workdir``; otherwise None. An attempt leaves finished pieces there,
            best as hard links, and the next attempt after an interruption reuses the pieces that it can verify. The folder is
            removed when the action has its result, or after a failure that a retry cannot fix. For one that keeps a memory: its folder
            on this machine, whatever the action, which is removed after some days without use.
        input_digests: Digest of each input artifact by the input's name; empty if the stage runs alone on plain folders.
    """

    workdir: Path
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("slipway.stage"))
    max_memory_bytes: int = 4 << 30
    threads: int = 1
    kept: Path | None = None
    input_digests: Mapping[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    digests: dict[Path, str] = field(default_factory=dict)
    adopted: list[Adopted] = field(default_factory=list)
    on_progress: Callable[[Progress], None] = lambda _: None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def progress(self, phase: str, *, done: int, total: int = 0, unit: str = "bytes") -> None:
        """Report progress, and stop here if the attempt was cancelled.

        It is cheap enough to call once per tensor or sample; call it at least once a second if possible.

        Raises:
            StageError: ``CANCELLED``.
        """
        self.check_cancelled()
        self.on_progress(Progress(phase=phase, done=done, total=total, unit=unit))

    def check_cancelled(self) -> None:
        """Stop here if the attempt was cancelled.

        Raises:
            StageError: ``CANCELLED``.
        """
        if self.cancelled.is_set():
            raise StageError("the stage was cancelled", reason="CANCELLED")

    def record(self, **facts: Any) -> None:
        """Add JSON-ready facts about the result (sizes, norms, chosen engine); they appear in the report.

        Together they may have at most :data:`MOST_FACTS_BYTES`. Long lists are cut, so write a list of all tensors of a model to
        a file of the output.
        """
        self.facts.update(cut_lists(facts))

    def digest(self, path: Path, sha256: str) -> None:
        """Report the SHA-256 (64 hexadecimal digits) of a finished output file, computed while it was written.

        The store then takes the file without reading it again. A wrong digest is found when the file is first read from the store.
        """
        self.digests[path] = f"sha256:{sha256}"

    def adopt(self, name: str, path: str, digest: str) -> None:
        """Make a file of an input, which :attr:`Stage.adopts` names, a file of the main output without reading it.

        Args:
            name: Name of the input.
            path: Path of the file in the input and in the output.
            digest: Digest that it must have; the output is refused if the input has another one.
        """
        self.adopted.append(Adopted(name, path, digest))

    def warn(self, message: str) -> None:
        """Log a warning that the user will also find in the export's result."""
        self.log.warning(message)
        self.facts.setdefault("warnings", []).append(message)


@dataclass(frozen=True, slots=True)
class Provider:
    """A library or device that a stage can use, as ``slipway doctor`` shows it.

    Attributes:
        name: Name, for example ``onnx`` or ``tensorrt-rtx``.
        available: Whether it can be used on this machine now.
        version: Its version; empty if not installed.
        detail: What it provides if available, otherwise what is missing and how to get it.
    """

    name: str
    available: bool
    version: str = ""
    detail: str = ""


class Role(Enum):
    """A part that one stage plays; plans and commands find the stage by its role. Formats plan all other tasks."""

    COMBINATION = auto()
    """Combine several adapters into one; inputs: ``adapter`` and further ones."""
    PREPARATION = auto()
    """Convert a base model from another storage format to plain safetensors; input: ``base``."""
    MERGE = auto()
    """Make the merged model, from which every format starts; inputs: ``base`` and ``adapter``."""
    CALIBRATION_DATA = auto()
    """Choose the text for calibration; inputs: ``model``, optionally ``calibration`` and ``heldout``."""
    CALIBRATION = auto()
    """Choose the integers of weights by their effect on text; inputs: ``model`` and ``data``."""
    QUANTIZATION = auto()
    """Make a format's output at a level; inputs: ``model``, the unquantized output, and optionally ``calibration``."""
    REFERENCE = auto()
    """Run base + adapter, with which outputs are compared; inputs: ``base``, ``adapter``, optionally ``heldout``,
    ``own_text`` (text like that of the training, on which the adapter is judged) and ``test_inputs``."""
    VALIDATION = auto()
    """Judge every output; inputs: as of the reference, ``reference``, and the outputs by name."""
    CONVERSION = auto()
    """Convert pickled weights to safetensors outside of an export; input: ``source``, parameters ``file`` and ``key``, output ``converted``."""
    ANSWERING = auto()
    """Let base, base + adapter and outputs answer a prompt, outside of an export; inputs as of the validation, parameters ``prompt``, ``chat``,
    ``max_new_tokens``, ``models`` and ``question``, output ``answers`` (:mod:`slipway.validation.questions`)."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The approximate duration of a stage on two cores, and of its phases; the plan and the progress display use it.

    Attributes:
        seconds: Time for any model.
        seconds_per_gb: Additional time for each GB that it makes (or validates), or that its forecast counts as work.
        phases: Beginning and end of each phase within the stage, from 0 to 1, by the phase's first word.
    """

    seconds: float = 4.0
    seconds_per_gb: float = 0.0
    phases: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def expected_seconds(self, work_bytes: float, *, times: int = 1) -> float:
        """Return the expected time of so much work; ``times`` says how often it takes the time for any model."""
        return times * self.seconds + work_bytes / 1e9 * self.seconds_per_gb


class Keeps(Enum):
    """What attempts of a stage leave in :attr:`Context.kept` for later ones."""

    NOTHING = auto()
    PIECES = auto()
    """Finished pieces of an interrupted attempt, from which the next attempt of the same action continues."""
    MEMORY = auto()
    """What attempts of any action learned on this machine, such as measured times. It must not change what the output means. Another
    attempt of the stage that runs at the same time has no such folder."""


@dataclass(frozen=True, slots=True)
class Forecast(Generic[P]):
    """What a stage says of a task before anything runs, by the task's parameters.

    ``describes`` and ``examines`` raise a :class:`~slipway.errors.ModelExportError` where the stage would refuse what they are given; the others raise nothing.

    Attributes:
        output_bytes: Returns an upper estimate of the output's size for a model of this size.
        refuses: Returns why the stage does not support a model with this :class:`~slipway.model.configuration.ModelConfig`; empty if it does.
        describes: Returns something worth knowing about the parameters with this model (name of the check, message), or None.
        advice: Returns a warning about the parameters alone (name of the check, message, remedy), or None.
        work_bytes: Returns how many bytes the time of the stage's effort counts, from what it makes or validates and the model's size.
        examines: Reads the input ``adapter``, where it is a local folder, and returns warnings about it. It reads headers and settings only.
    """

    output_bytes: Callable[[P, ModelSize], int] = lambda _params, _size: 0
    refuses: Callable[[P, Any], str] = lambda _params, _config: ""
    describes: Callable[[P, Any], tuple[str, str] | None] = lambda _params, _config: None
    advice: Callable[[P], tuple[str, str, str] | None] = lambda _params: None
    work_bytes: Callable[[P, int, ModelSize], float] = lambda _params, made, _size: made
    examines: Callable[[P, Path], tuple[str, ...]] = lambda _params, _adapter: ()


@dataclass(frozen=True, slots=True)
class Deferral(Generic[P]):
    """How a stage takes part where weights are left out of outputs and made where they are read (``weights: deferred``).

    Attributes:
        leaves_out: Whether weights may be left out of the main output with these parameters. A task that reads such an output also gets
            the inputs of the task that made it, under their names.
        reads: Returns the names of the inputs whose weights may be left out, with these parameters.
        compares: Whether the stage compares its output itself with what only the weights show. Then they are left out only if validation
            compares outputs.
        reader: ``module:attribute`` of a :data:`slipway.model.weights.reading.Reader` for main outputs without their weights; empty if others
            never read them.
    """

    leaves_out: Callable[[P], bool] = lambda _params: False
    reads: Callable[[P], tuple[str, ...]] = lambda _params: ()
    compares: bool = True
    reader: str = ""


@dataclass(frozen=True, slots=True)
class Division(Generic[P]):
    """How the work of a stage is divided into parts, each a task of its own, and how one more task joins them (:mod:`slipway.division`).

    The joined output has the bytes of the undivided one, file by file.

    Attributes:
        most: Returns into how many parts a task can be divided, by its parameters, the names of its inputs, and the bytes of its
            model's weights; 1 if it cannot.
        run: Does a part: as :attr:`Stage.run`, but it gets the part before the context, and returns one folder.
        join: Joins the folders of all parts, given by the names of the inputs in order: returns the folder of the main output.
        adopts: Patterns of the paths of the parts' files that the join does not read, but adopts into its output
            (:meth:`Context.adopt`). They are not fetched, and stored once.
    """

    most: Callable[[P, Collection[str], int], int]
    run: Callable[[Mapping[str, Path], P, Part, Context], Path]
    join: Callable[[Mapping[str, Path], P, Context], Path]
    adopts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a stage needs of a machine, and what its output has of it.

    Attributes:
        memory: Memory that a worker should have, as a multiple of the merged model's size; 0 for a streaming stage.
        less_memory: What the stage leaves out with the memory of a streaming one; empty if it then fails.
        gpu_memory: The same for the GPU's memory, if the task needs a GPU.
        device_bound: Whether the output depends on the GPU's architecture, which is then part of the action key.
        gpu_bound_output: Whether the output runs only on the GPU architectures that its fact ``targets`` names.
    """

    memory: float = 0.0
    less_memory: str = ""
    gpu_memory: float = 0.0
    device_bound: bool = False
    gpu_bound_output: bool = False


@dataclass(frozen=True, slots=True)
class Installation:
    """How it is known whether a machine has what a stage needs.

    Attributes:
        probe: Function that returns the stage's providers on this machine. It reads only installed metadata and imports nothing heavy.
            None: its libraries.
        alternatives: Whether any one of its providers is enough; otherwise it needs them all.
        own_environment: Why its libraries are installed in an environment of their own; empty if they fit beside all others.
    """

    probe: Callable[[], tuple[Provider, ...]] | None = None
    alternatives: bool = False
    own_environment: str = ""


@dataclass(frozen=True)
class Stage(Generic[P]):
    """One kind of work: names, versions, and the function that does it. What only some stages have is a value of its own.

    Attributes:
        name: Name on the command line, in plans and in reports.
        version: Raised whenever the same inputs and parameters give another output; part of the action key.
        inputs: Names of the input folders, all required.
        outputs: Names of the output folders, the main one first.
        params: The stage's parameters.
        run: ``run(inputs, params, ctx) -> {output name: folder below ctx.workdir}``. It may raise any
            :class:`~slipway.errors.ModelExportError`; any other exception is reported as ``STAGE_ERROR``.
        libraries: Distributions whose versions affect the output; part of the action key.
        optional_inputs: Names of input folders that it can do without.
        more_inputs: Whether it accepts inputs with other names too (validate accepts every output by its format's name).
        role: The part it plays in every export; None for a stage that only formats plan.
        effort: Approximate duration relative to other stages.
        keeps: What its attempts leave for later ones.
        forecast: What it says of a task before anything runs.
        hardware: What it needs of a machine, and what its output has of it.
        deferral: How it takes part where weights are left out of outputs.
        division: How its work is divided into several tasks; None if it is not.
        adopts: Patterns of the paths of its inputs' files that it does not read (:meth:`Context.adopt`).
        installation: How it is known whether a machine has what it needs.
        recovery: YAML file with ``rules`` for the attempt after a failure of this stage, and ``guidance`` for people by reason
            (docs/adding-a-stage.md); None if only the rules for all stages apply.
    """

    name: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: type[P]
    run: Callable[[Mapping[str, Path], P, Context], dict[str, Path]]
    libraries: tuple[str, ...] = ()
    optional_inputs: tuple[str, ...] = ()
    more_inputs: bool = False
    role: Role | None = None
    effort: Effort = Effort()
    keeps: Keeps = Keeps.NOTHING
    forecast: Forecast[P] = Forecast()
    hardware: Hardware = Hardware()
    deferral: Deferral[P] = Deferral()
    division: Division[P] | None = None
    adopts: tuple[str, ...] = ()
    installation: Installation = Installation()
    recovery: Path | None = None

    @property
    def main_output(self) -> str:
        """Return the name of the output that later tasks use."""
        return self.outputs[0]

    def library_versions(self) -> dict[str, str]:
        """Return the installed versions of :attr:`libraries`; empty for one that is not installed."""
        return {name: installed_version(name) for name in self.libraries}

    def providers(self) -> tuple[Provider, ...]:
        """Return the stage's providers on this machine; by default, its libraries."""
        if self.installation.probe is not None:
            return self.installation.probe()
        return tuple(library_provider(name) for name in self.libraries)


def cut_lists(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Cut each list in the facts to 300 entries; add the number of missing ones as ``NAME_left_out``.

    Models with many experts have tens of thousands of tensors.
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


def library_provider(distribution: str) -> Provider:
    """Return a distribution as a provider that is available if installed."""
    version = installed_version(distribution)
    detail = "" if version else f"pip install {distribution}"
    return Provider(name=distribution, available=bool(version), version=version, detail=detail)

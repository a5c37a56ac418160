"""The contract between Slipway and a format: one frozen value that says everything others have to know of it.

A distribution brings a :class:`Format` under the entry point group ``slipway.formats``. The module that holds it imports nothing heavy:
configurations, plans, reports and coordinators read it on machines where the format's libraries are not installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from slipway.estimates import ModelSize
from slipway.formats.settings import FormatSettings, LevelSettings
from slipway.formats.tasks import FormatRequest, PlannedTask
from slipway.requirements import Needs
from slipway.settings.problems import Problem

S = TypeVar("S", bound=FormatSettings)

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_LEVEL = re.compile(r"[a-z0-9][a-z0-9_]{0,31}")
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_TAKEN = {"adapter", "base", "heldout", "validation", "enabled", *dir(BaseModel)}
"""Names that an output cannot have: those of a validation's other inputs, and its own; and what a section of formats has besides."""


@dataclass(frozen=True, slots=True)
class RefusedLevel:
    """A level of other formats that this one is known not to have.

    Attributes:
        why: What stands against it.
        instead: The level of this format that comes nearest.
    """

    why: str
    instead: str


@dataclass(frozen=True, slots=True)
class Runtime:
    """How an output is recognised and run for validation.

    Attributes:
        name: What runs it, for reports.
        files: Patterns; a folder that has a file of any of them holds an output of this format.
        load: ``module:attribute`` of a function ``load(folder, *, threads) -> LanguageModel`` (``slipway_validate.runner.model``). Only
            the process that runs the output imports it; an ImportError there says that this machine cannot run it.
        families: Names of the families of models that it runs (``slipway.models.families``), outputs of others are not run; None: all.
        prefers: What a worker should have so that outputs can be run; None for nothing.
        precision_file: JSON file of an output whose ``precision`` names the type of its weights; empty for none.
        stored_dtype: Type of the weights where nothing names one; empty for not known.
    """

    name: str
    files: tuple[str, ...]
    load: str
    families: tuple[str, ...] | None = ("decoder",)
    prefers: Needs | None = None
    precision_file: str = ""
    stored_dtype: str = ""

    def recognises(self, folder: Path) -> bool:
        """Return whether a folder holds an output of this format."""
        return any(any(folder.glob(pattern)) for pattern in self.files)


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage example of the model card.

    Attributes:
        template: Package and file name of a Jinja template for Python code. It gets ``folder`` (the code's first folder), ``others``
            (further ones), ``chat`` (whether all have a chat template) and ``family`` (``slipway.models.families``), and may include ``prompt.example.j2``.
        library: ``library_name`` of the card's front matter.
        packages: What the code needs, for ``pip install``.
        chat_packages: The same where it applies a chat template.
        level_packages: What single levels need besides.
    """

    template: tuple[str, str]
    library: str
    packages: str
    chat_packages: str = ""
    level_packages: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Traversable:
        """The template's file."""
        package, name = self.template
        return files(package).joinpath(name)


def _nothing(_: Any) -> tuple[()]:
    return ()


def _always(_: Any) -> bool:
    return True


@dataclass(frozen=True)
class Format(Generic[S]):
    """One kind of output: its settings, its tasks, and how it is estimated, validated and described.

    Attributes:
        name: Name in configurations, plans and reports; outputs lie in ``NAME/`` and ``NAME-LEVEL/``.
        title: The format in a few words.
        settings: Model of its section under ``formats:``; a :class:`LevelSettings` where it has levels. A docstring with
            ``Attributes:`` says what each setting means.
        plan: Tasks for what is asked for. Pure. The task that delivers an output names it in ``format``.
        levels: Quantization levels it can be delivered at.
        refused_levels: Levels of other formats that it is known not to have, with why.
        is_model: Whether its unquantized output is the merged model itself; ``plan`` then gives the tasks of its levels alone.
        needs_tokenizer: Whether, with these settings, the merged model has to come with its tokenizer.
        rank: Place among the formats in tables and plans, lowest first.
        variables: ``EXPORT_*`` variables by setting, where another name than ``EXPORT_{NAME}_{SETTING}`` (or ``EXPORT_ENABLE_{NAME}``) is wanted.
        conflicts: Settings of the enabled format that contradict each other; keys are those of the section.
        cautions: What the user should know about settings that are kept.
        output_bytes: Size of an output at a level (empty: unquantized), estimated from above; None takes the estimate of its stage.
        runtime: How outputs are recognised and run for validation; None leaves them not validated, which the report says.
        quantizer: ``module:attribute`` of a ``slipway_quantize.quantizer.Quantizer``; empty where the quantize stage makes no levels of it.
        usage: The usage example of the model card; None for none.
        media_types: Media types of its files by suffix (``.onnx``).
        sample: The section's settings in the configuration that ``slipway sample`` writes, as one line of YAML; empty leaves it out.
    """

    name: str
    title: str
    settings: type[S]
    plan: Callable[[FormatRequest[S]], tuple[PlannedTask, ...]]
    levels: tuple[str, ...] = ()
    refused_levels: Mapping[str, RefusedLevel] = field(default_factory=dict)
    is_model: bool = False
    needs_tokenizer: Callable[[S], bool] = _always
    rank: int = 100
    variables: Mapping[str, str] = field(default_factory=dict)
    conflicts: Callable[[S], Iterable[Problem]] = _nothing
    cautions: Callable[[S], Iterable[str]] = _nothing
    output_bytes: Callable[[str, ModelSize], int] | None = None
    runtime: Runtime | None = None
    quantizer: str = ""
    usage: Usage | None = None
    media_types: Mapping[str, str] = field(default_factory=dict)
    sample: str = ""

    def __post_init__(self) -> None:
        """Refuse what could not be used later.

        Raises:
            ValueError: with what is wrong.
        """
        if not _NAME.fullmatch(self.name) or self.name in _TAKEN:
            raise ValueError(f"{self.name!r} cannot be a format's name: use lower-case letters, digits and underscores")
        wrong = [level for level in self.levels if not _LEVEL.fullmatch(level) or level == "none"]
        if wrong:
            raise ValueError(f"{wrong[0]!r} cannot be a level's name: use lower-case letters, digits and underscores")
        base = LevelSettings if self.levels else FormatSettings
        if not issubclass(self.settings, base):
            raise ValueError(f"{self.settings.__name__} is no {base.__name__}")  # noqa: TRY004 - as what else is wrong
        unknown = sorted(set(self.variables) - set(self.settings.model_fields))
        if unknown:
            raise ValueError(f"variables names {unknown[0]!r}, which is no setting")
        for reference in filter(None, (self.quantizer, self.runtime.load if self.runtime else "")):
            if not _REFERENCE.fullmatch(reference):
                raise ValueError(f"{reference!r} is not module:attribute")

    def output_name(self, level: str = "") -> str:
        """Return the name of an output at a level; empty: unquantized."""
        return f"{self.name}-{level}" if level else self.name

    def variable(self, setting: str) -> str:
        """Return the ``EXPORT_*`` variable of a setting."""
        usual = f"ENABLE_{self.name}" if setting == "enabled" else f"{self.name}_{setting}"
        return self.variables.get(setting, f"EXPORT_{usual.upper()}")

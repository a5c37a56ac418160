"""The contract between Slipway and a format: one frozen value with everything that others have to know about it.

A distribution provides a :class:`Format` under the entry point group ``slipway.formats``. Its module must import nothing heavy, because
configurations, plans, reports and coordinators use it on machines without the format's libraries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.dataclasses import dataclass

from slipway.formats.settings import FormatSettings, LevelSettings
from slipway.formats.targets import Fit
from slipway.formats.tasks import FormatRequest, PlannedTask
from slipway.requirements import Needs
from slipway.settings.problems import Problem
from slipway.settings.sections import is_section, plain_type
from slipway.sizes import ModelSize
from slipway.validation.inputs import ADAPTER, NOT_OUTPUTS

S = TypeVar("S", bound=FormatSettings)

_CHECKED = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_LEVEL = re.compile(r"[a-z0-9][a-z0-9_]{0,31}")
_VARIABLE = re.compile(r"EXPORT_[A-Z0-9_]{1,100}")
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_TAKEN = {*NOT_OUTPUTS, "validation", "enabled", *dir(BaseModel)} - {ADAPTER}
"""Names that a format cannot have: the inputs and the output of a validation, and the attributes of the section ``formats:``.

The adapter's name is allowed: exports start from an adapter, and may deliver it."""


@dataclass(frozen=True, slots=True, config=_CHECKED)
class RefusedLevel:
    """A level of other formats that this format lacks on purpose.

    Attributes:
        why: The reason.
        instead: The nearest level of this format.
    """

    why: str
    instead: str


@dataclass(frozen=True, slots=True, config=_CHECKED)
class Runtime:
    """The way to recognise an output and to run it for validation.

    Attributes:
        name: Name of the runtime, for reports.
        files: File patterns; a folder with a file that matches any of them holds an output of this format.
        load: ``module:attribute`` of a function ``load(folder, *, threads) -> LanguageModel`` (``slipway.proof.runtime``). Only
            the process that runs the output imports it; an ImportError there means that this machine cannot run it.
        on_base: Whether its outputs hold the adapter alone: the function is ``load(folder, base, *, threads)``, with the folder of the base model.
        families: Names of the model families that it runs (``slipway.model.families``); outputs of other families are not run. None: all.
        prefers: Needs of a worker that runs outputs; None for nothing.
        precision_file: JSON file of an output whose ``precision`` names the type of its weights; empty for none.
        stored_dtype: Type of the weights if no file names one; empty if unknown.
        reads_text: Whether it reads text and conversations with a tokenizer and chat template of the output, which are compared with
            transformers' (``tokens_of`` and ``rendered`` of the model that ``load`` returns).
        explain: ``module:attribute`` of a function ``explain(folder, model)`` that describes how the weights of an output differ from the
            merged model's; it is called if the output's results differ. If the export delivers no merged model, it is called with
            ``exact=False`` and the base: then differences in the adapter's layers are right. Empty for none.
        stored: ``module:attribute`` of a function ``stored(folder, model, rows) -> StoredModel`` (``slipway.proof.stored_weights``) that
            reads the weights which an output stores, by the names that the model in ``model`` gives them; ``rows(name)`` is the number of output
            features of one of its weights, 0 if it has none of this name. Empty if the validation reads them itself, or if nothing reads them.
        rounds: How the runtime rounds values while results are compared, by level; ``""`` stands for all other levels. For the inputs of a product:
            ``float16``, ``bfloat16``, ``int8/N`` (blocks of N values), ``int8/row``, ``int8/tensor``, ``float8/row``, or ``static`` for ranges
            that lie in the output. For the results of operations: ``results/float16``, ``results/bfloat16``. A level without an entry rounds
            nothing: it computes in float32.
        halves_encoder: Whether, where it rounds, it computes the part for images and sound in float16 whatever the level is. Otherwise that part
            computes in float32.
        inspect: ``module:ATTRIBUTE`` of a stage for ``slipway inspect``: input ``model``, parameter ``file``, and an output
            ``inspection`` as :class:`slipway.model.activations.Inspection` writes it; empty for none.
    """

    name: str
    files: tuple[str, ...]
    load: str
    on_base: bool = False
    families: tuple[str, ...] | None = ("decoder",)
    prefers: Needs | None = None
    precision_file: str = ""
    stored_dtype: str = ""
    reads_text: bool = False
    explain: str = ""
    stored: str = ""
    rounds: Mapping[str, str] = field(default_factory=dict)
    halves_encoder: bool = False
    inspect: str = ""

    def __post_init__(self) -> None:
        """Refuse a pattern that cannot be searched for in a folder.

        Raises:
            ValueError: A pattern is empty or absolute.
        """
        wrong = [pattern for pattern in self.files if not pattern or pattern.startswith("/")]
        if wrong:
            raise ValueError(f"{wrong[0]!r} cannot be a pattern of files")

    def rounding(self, level: str) -> str:
        """Return how values are rounded at a level; empty if they are not."""
        return self.rounds.get(level, self.rounds.get("", ""))

    def recognises(self, folder: Path) -> bool:
        """Return whether a folder holds an output of this format."""
        return any(any(folder.glob(pattern)) for pattern in self.files)


@dataclass(frozen=True, slots=True, config=_CHECKED)
class Usage:
    """The usage example of the model card.

    Attributes:
        template: Package and file name of a Jinja template for Python code. It gets ``folder`` (the folder that the code names first),
            ``others`` (further folders), ``entries`` (names of files and folders in the first), ``sentences`` (whether it encodes whole texts), ``pooled`` (whether a graph of it does that alone), ``prompts`` (what it puts before texts: ``slipway.model.tokens.prompts``), ``words`` (literal of a text, with the prompt before it), ``pair`` (literals of a question and a passage, likewise), ``sound`` (the codec of a model that answers with tokens of sound: ``slipway.model.tokens.sound``), ``answer`` and ``written`` (functions that return the code to show tokens, or a text), ``chat`` (whether all have a chat template) and ``family`` (``slipway.model.families``), and may include ``prompt.example.j2``.
        library: ``library_name`` of the card's front matter.
        packages: Packages that the code needs, as arguments of ``pip install``.
        chat_packages: The same for code that applies a chat template.
        family_packages: The same by name of a family whose code needs others.
        variant_packages: The same by name of a variant whose code needs others.
        level_packages: Further packages by level.
        sentence_packages: As ``packages`` for a sentence encoder, if its code needs others.
    """

    template: tuple[str, str]
    library: str
    packages: str
    chat_packages: str = ""
    family_packages: Mapping[str, str] = field(default_factory=dict)
    variant_packages: Mapping[str, str] = field(default_factory=dict)
    level_packages: Mapping[str, str] = field(default_factory=dict)
    sentence_packages: str = ""

    @property
    def path(self) -> Traversable:
        """Return the template's file."""
        package, name = self.template
        return files(package).joinpath(name)


@dataclass(frozen=True, slots=True, config=_CHECKED)
class Quantization:
    """What there is beside the names of a format's levels.

    Attributes:
        unquantized: Another name for its unquantized output in a list of levels, such as ``f16``; empty for none.
        text_levels: Levels of its own that are made with the text of an export that names some (``optimization.calibration``).
        refused: Levels of other formats that this one lacks on purpose, each with the reason.
        group_sizes: Numbers of weights in a row that may share one scale, smallest first; empty: all of ``optimization.group_size``. Its levels get
            the nearest of them, with a warning.
        calibrated: Whether its quantizer takes the integers of a calibration (``optimization.method``).
        zero_points: Whether its runtimes take zero points beside weights of other bits; if not, its calibrated integers have none.
        quantizer: ``module:attribute`` of a ``slipway_quantize.quantizer.Quantizer``; empty if the quantize stage does not make its levels.
        packager: ``module:attribute`` of a function ``package(folder, *, level, ctx)`` that completes each output at a level. The output begins
            with a copy of the unquantized output's description; the function adds the files that were asked for beside the weights. Empty for none.
    """

    unquantized: str = ""
    text_levels: tuple[str, ...] = ()
    refused: Mapping[str, RefusedLevel] = field(default_factory=dict)
    group_sizes: tuple[int, ...] = ()
    calibrated: bool = False
    zero_points: bool = True
    quantizer: str = ""
    packager: str = ""


@dataclass(frozen=True, slots=True, config=_CHECKED)
class Variants(Generic[S]):
    """Outputs of a format beside the plain one and those of its levels.

    Attributes:
        names: Function that returns the variants that these settings ask for; a variant's output is named ``NAME-VARIANT``, like that of a level.
        plain: Function that says whether these settings ask for the output that is neither a level nor a variant.
        runtimes: The way to recognise and run outputs of a variant, by its name. Without one, they run like those of the format whose
            runtime recognises their folder.
    """

    names: Callable[[S], Iterable[str]] = lambda _: ()
    plain: Callable[[S], bool] = lambda _: True
    runtimes: Mapping[str, Runtime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=_CHECKED)
class SectionRules(Generic[S]):
    """What a format's section of the configuration has beside its settings.

    Attributes:
        variables: ``EXPORT_*`` variables by setting, if they are not ``EXPORT_{NAME}_{SETTING}`` (or ``EXPORT_ENABLE_{NAME}``).
        flags: Settings (or parts of one: ``activations.layers``) by the flag of ``slipway export`` that is a shorthand for them.
        conflicts: Function that returns the contradictions in the enabled format's settings; their keys are relative to the section.
        cautions: Function that returns warnings about valid settings.
        sample: The section's settings in the configuration that ``slipway sample`` writes, as one line of YAML; empty omits the section.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    conflicts: Callable[[S], Iterable[Problem]] = lambda _: ()
    cautions: Callable[[S], Iterable[str]] = lambda _: ()
    sample: str = ""


@dataclass(frozen=True, config=_CHECKED)
class Format(Generic[S]):
    """One kind of output: its settings, its tasks, and how it is estimated, validated and described.

    Attributes:
        name: Name in configurations, plans and reports; outputs lie in ``NAME/`` and ``NAME-LEVEL/``.
        title: The format in a few words.
        settings: Model of its section under ``formats:``; a :class:`LevelSettings` if the format has levels. Its docstring explains each
            setting under ``Attributes:``.
        plan: Pure function that returns the tasks for a request. The task that delivers an output names it in ``format``.
        levels: Its quantization levels.
        quantization: How they are named, asked for and made.
        variants: Its outputs beside the plain one and those of its levels.
        is_model: Whether its unquantized output is the merged model itself; ``plan`` then returns only the tasks of its levels.
        needs_tokenizer: Function that says whether, with these settings, the merged model needs its tokenizer.
        rules: What its section of the configuration has beside its settings.
        rank: Place among the formats in tables and plans, lowest first.
        output_bytes: Function that returns, from above, the size of an output with these settings at a level (empty: unquantized) of a model of
            this size; None uses the estimate of its stage.
        longest_text: Function that returns the most tokens of a text that outputs with these settings take, so that all are judged on texts of that
            length; 0 for as many as the model takes.
        runtime: The way to recognise and run outputs for validation; with None, outputs are not validated, and the report says so.
        usage: The usage example of the model card; None for none.
        media_types: Media types of its files by suffix (``.onnx``).
        fits: The targets that its outputs run well on, with the reason; ``slipway recommend`` chooses among them.
    """

    name: str
    title: str
    settings: type[S]
    plan: Callable[[FormatRequest[S]], tuple[PlannedTask, ...]]
    levels: tuple[str, ...] = ()
    quantization: Quantization = Quantization()
    variants: Variants[S] = Variants()
    rules: SectionRules[S] = SectionRules()
    is_model: bool = False
    needs_tokenizer: Callable[[S], bool] = lambda _: True
    rank: int = 100
    output_bytes: Callable[[S, str, ModelSize], int] | None = None
    longest_text: Callable[[S], int] = lambda _: 0
    runtime: Runtime | None = None
    usage: Usage | None = None
    media_types: Mapping[str, str] = field(default_factory=dict)
    fits: tuple[Fit, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a value that could not be used later; the types of all fields are checked before.

        Raises:
            ValueError: A field is wrong.
        """
        if not _NAME.fullmatch(self.name) or self.name in _TAKEN:
            raise ValueError(f"{self.name!r} cannot be a format's name: use lower-case letters, digits and underscores")
        named = [*self.levels, *filter(None, [self.quantization.unquantized]), *self.variants.runtimes]
        wrong = [level for level in named if not _LEVEL.fullmatch(level) or level == "none" or named.count(level) > 1]
        if wrong:
            raise ValueError(f"{wrong[0]!r} cannot be a level's name: use lower-case letters, digits and underscores")
        self._check_fits()
        base = LevelSettings if self.levels else FormatSettings
        if not issubclass(self.settings, base):
            raise ValueError(f"{self.settings.__name__} is not a {base.__name__}")  # noqa: TRY004 - like every other fault here
        unknown = sorted(
            {*self.rules.variables, *(key.partition(".")[0] for key in self.rules.flags.values())}
            - set(self.settings.model_fields)
        )
        if unknown:
            raise ValueError(f"variables or flags name {unknown[0]!r}, which is not a setting")
        self.settings()  # every setting needs a default
        for name, info in self.settings.model_fields.items():
            if is_section(plain_type(info.annotation)):
                raise ValueError(f"its setting {name!r} is a section")
        names = self.all_variables()
        wrong = [name for name in names if not _VARIABLE.fullmatch(name) or names.count(name) > 1]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not EXPORT_NAME, or belongs to two settings")
        of_runtimes = (name for each in self.runtimes() for name in (each.load, each.inspect, each.explain))
        for reference in filter(None, (self.quantization.quantizer, self.quantization.packager, *of_runtimes)):
            if not _REFERENCE.fullmatch(reference):
                raise ValueError(f"{reference!r} is not module:attribute")

    def _check_fits(self) -> None:
        unknown = sorted({level for fit in self.fits for level in fit.levels if level} - set(self.levels))
        if unknown:
            raise ValueError(f"its fits name {unknown[0]!r}, which is none of its levels")

    def output_name(self, level: str = "") -> str:
        """Return the name of the output at a level; empty: unquantized."""
        return f"{self.name}-{level}" if level else self.name

    def runtime_of(self, level: str) -> Runtime | None:
        """Return the runtime of outputs at a level or of a variant; the format's own if a variant has none."""
        return self.variants.runtimes.get(level, self.runtime)

    def runtimes(self) -> tuple[Runtime, ...]:
        """Return all runtimes."""
        return (*self.variants.runtimes.values(), *((self.runtime,) if self.runtime else ()))

    def variable(self, setting: str) -> str:
        """Return the ``EXPORT_*`` variable of a setting."""
        usual = f"ENABLE_{self.name}" if setting == "enabled" else f"{self.name}_{setting}"
        return self.rules.variables.get(setting, f"EXPORT_{usual.upper()}")

    def group_size(self, wanted: int) -> int:
        """Return the number of weights that share one scale in its levels: the wanted one, or the nearest that it has."""
        return min(self.quantization.group_sizes or (wanted,), key=lambda size: abs(size - wanted))

    def all_variables(self) -> tuple[str, ...]:
        """Return the variables of all settings."""
        return tuple(map(self.variable, self.settings.model_fields))

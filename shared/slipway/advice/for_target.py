"""Load a configuration; if it names a target but no format, use the formats recommended for the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.configuration.layers import Layer, Setting
from slipway.configuration.loading import Given, LoadedConfiguration, load
from slipway.formats.targets import TARGETS, target_name
from slipway.model.families import DECODER
from slipway.settings.problems import Problem

if TYPE_CHECKING:
    from slipway.advice.candidates import Subject

TARGET, LEVELS = "output.target", "optimization.quantization"


def load_configuration(
    path: Given | None,
    *,
    environment: Mapping[str, str],
    flags: Mapping[str, str | None] | None = None,
    assignments: Sequence[str] | Mapping[str, Any] = (),
    requested: Sequence[str] = (),
    folder: Path | None = None,
) -> LoadedConfiguration:
    """Read the YAML file, then ``EXPORT_*``, then flags; for each setting, the last source wins.

    Where ``output.target`` is set and no source names a format or a level of one, the formats are those that ``slipway recommend`` puts
    first for the target and the model.

    Args:
        path: The YAML file, or its contents: nested plain data as below ``export:``, or a configuration. None reads none.
        environment: Usually ``os.environ``.
        flags: Texts of ``--base-model``, ``--checkpoint``, ``--target`` and ``--out``; None if not given.
        assignments: Texts of ``--set``, or values by setting.
        requested: Texts of ``-f``: the formats to make, in place of those of the other sources.
        folder: Start of relative paths in variables, flags and defaults; the current folder by default.

    Raises:
        ConfigurationError: All problems at once; ``CONFIGURATION_NOT_FOUND``; ``TARGET_UNFIT``: nothing installed fits the target.
    """
    return load(
        path,
        environment=environment,
        flags=flags,
        assignments=assignments,
        requested=requested,
        folder=folder,
        choose=_formats_for,
    )


def _formats_for(settings: Mapping[str, Setting]) -> Layer:
    """Return the format settings for the target; none if it is unknown, which is reported with the other problems."""
    from slipway.advice.candidates import recommend, sections_for

    layer, target = Layer(), target_name(str(settings[TARGET].value))
    if target not in TARGETS:
        return layer
    subject = _subject(settings)
    off = {key.split(".")[1] for key, each in settings.items() if _is_turned_off(key, each)}
    usable = [one for one in recommend(target, subject=subject, family=DECODER.name) if not one.unfit]
    fit, asked = [one for one in usable if one.format not in off], _requested_levels(settings)
    best = next((one for one in fit if not asked or one.level in asked), None)
    if best is None:
        outputs = f"fit for it are {', '.join(dict.fromkeys(one.output for one in fit or usable))}"
        if fit:
            fault = f"{', '.join(asked)} is not known to be fit for output.target {target}"
            layer.problems.append(Problem(LEVELS, fault, f"{outputs}; or name a format", settings[LEVELS].source))
        else:
            fault = f"all formats that are fit for {target} are off"
            layer.problems.append(Problem(TARGET, fault, f"{outputs}; or name a format", settings[TARGET].source))
        return layer
    sections = sections_for(best)
    if asked:
        sections[best.format]["quantization"] = list(asked)
    for name, section in sections.items():
        for key, value in section.items():
            layer.settings[f"formats.{name}.{key}"] = Setting(value, f"{TARGET}: {target}")
    if subject is None:
        layer.warnings.append(
            f"{TARGET}: {target}: {best.output} is made, as for a model that writes text: the model itself cannot be read here; "
            "name formats with -f if it is of another kind"
        )
    return layer


def _is_turned_off(key: str, setting: Setting) -> bool:
    return key.startswith("formats.") and key.endswith(".enabled") and setting.value is False


def _requested_levels(settings: Mapping[str, Setting]) -> tuple[str, ...]:
    """Return the levels requested for all formats; an invalid value is reported with the other problems."""
    value = settings[LEVELS].value if LEVELS in settings else ()
    value = [value] if isinstance(value, str) else value
    return (
        tuple(level for level in value if isinstance(level, str) and level != "none") if isinstance(value, list) else ()
    )


def _subject(settings: Mapping[str, Setting]) -> Subject | None:
    """Return the model that is exported, if its files are here; None otherwise."""

    def text(key: str) -> str:
        value = settings[key].value if key in settings else ""
        return value if isinstance(value, str) else ""

    return subject_of(text("checkpoint.path"), text("base_model.name"))


def subject_of(run: str, base: str) -> Subject | None:
    """Return the model that an export would make, if its files are here; None otherwise.

    Args:
        run: Folder of a training run or checkpoint; empty, or ``none``, for the base as it is.
        base: Base model; empty for the one that the run names.
    """
    from slipway.advice.candidates import Subject
    from slipway.base_match.recorded import recorded_base
    from slipway.configuration.sections import without_none
    from slipway.errors import ModelExportError
    from slipway.files.paths import is_address
    from slipway.model.folder import ModelFolder
    from slipway.model.model_files import resolve_base_model
    from slipway.model.runs.checkpoints import find_checkpoint, read_adapter_config
    from slipway.model.trained import trained_model

    run, base = ("" if is_address(name) or name.startswith("sha256:") else name for name in (without_none(run), base))
    trained = None
    try:
        if run:
            checkpoint = find_checkpoint(Path(run)).path
            recorded = recorded_base(checkpoint, read_adapter_config(checkpoint))
            base = base or (recorded.name if recorded.folder is None else str(recorded.folder))
            trained = trained_model(ModelFolder.open(resolve_base_model(base)), checkpoint)
        return Subject.read(base, config=trained.config if trained else None) if base else None
    except (ModelExportError, ModuleNotFoundError, OSError):  # opening them reports the error
        return None
